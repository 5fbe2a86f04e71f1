"""FedFocal: FedAvg with the focal loss, by which images that are already classified well count little.

Sarkar, Narang and Rai, Fed-Focal Loss for imbalanced data classification in Federated Learning, IJCAI workshop on
federated learning 2020. The paper's choice of sites is left out, as in comparisons with it: train.participation draws.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.focal import Focal
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """The focal loss, which takes the place of train.loss."""

    gamma: float = Field(
        2.0, ge=0, description="exponent of 1 - p (FedIIC: 2); 0: every image counts alike, by train.loss: FedAvg"
    )

    def components(self) -> Sequence[Component]:
        return [Focal(gamma=self.gamma)] if self.gamma else []


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=(
        "Sarkar et al., Fed-Focal Loss for imbalanced data classification in Federated Learning, IJCAI workshop 2020"
    ),
    year=2020,
    changes="loss (focal)",
    options=Options,
)
