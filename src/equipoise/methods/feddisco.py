"""FedDisco: FedAvg that weighs a site by its size and by how evenly it has the classes.

Ye, Xu, Wang, Xu, Chen and Wang, FedDisco: Federated Learning with Discrepancy-Aware Collaboration, ICML 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.discrepancy import Discrepancy
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """FedDisco's weight of a site: max(0, share of the images - a * discrepancy + b)."""

    a: float = Field(0.5, ge=0, description="factor of a site's discrepancy, which lowers its share of the images")
    b: float = Field(0.1, description="constant added to every site's share; with a = 0 and b = 0: FedAvg")
    measure: Literal["l2", "kl"] = Field(
        "l2", description="distance of class shares from equal ones: Euclidean, or the Kullback-Leibler divergence"
    )

    def components(self) -> Sequence[Component]:
        return [Discrepancy(**self.model_dump())] if self.a or self.b else []


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Ye et al., FedDisco: Federated Learning with Discrepancy-Aware Collaboration, ICML 2023",
    year=2023,
    changes="aggregation (class discrepancy)",
    options=Options,
)
