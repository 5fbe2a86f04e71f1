"""FedVLS: sites train by a loss that class shares calibrate. They keep the global model's view of classes that they
lack, and hold logits of wrong classes down.

Guo, Ma, Jin, Zhang, Zhang and Cai, Exploring Vacant Classes in Label-Skewed Federated Learning, AAAI 2025.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.balanced_softmax import BalancedSoftmax
from equipoise.components.vacant import Vacant
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """FedVLS's three ideas."""

    calibrated: bool = Field(True, description="cross entropy is calibrated by class shares, as balanced softmax is")
    distillation: float = Field(
        0.1, ge=0, description="weight of the distillation over classes that the site lacks (its script's default: 1)"
    )
    suppression: float = Field(0.005, ge=0, description="weight of the suppression of wrong classes' logits")

    def components(self) -> Sequence[Component]:
        found: list[Component] = [BalancedSoftmax()] if self.calibrated else []
        if self.distillation or self.suppression:
            found.append(Vacant(distillation=self.distillation, suppression=self.suppression))
        return found


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Guo et al., Exploring Vacant Classes in Label-Skewed Federated Learning, AAAI 2025",
    year=2025,
    changes="loss (calibrated, distillation over absent classes, suppression of wrong logits)",
    options=Options,
)
