"""FedNTD: sites learn from labels, and keep what the global model says of the classes that an image is not of.

Lee, Jeong, Shin, Bae and Yun, Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, PositiveFloat

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.not_true import NotTrue
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """FedNTD's weight and temperature."""

    beta: float = Field(1.0, ge=0, description="weight of the distillation; 0: FedAvg")
    temperature: PositiveFloat = Field(1.0, description="tau, by which both nets' logits are divided")

    def components(self) -> Sequence[Component]:
        return [NotTrue(**self.model_dump())] if self.beta else []


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=(
        "Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS 2022"
    ),
    year=2022,
    changes="loss (distillation over wrong classes)",
    options=Options,
)
