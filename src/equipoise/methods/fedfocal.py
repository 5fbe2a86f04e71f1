"""FedFocal: FedAvg with the focal loss, by which images that are already classified well count little.

Sarkar, Narang and Rai, Fed-Focal Loss for imbalanced data classification in Federated Learning, IJCAI workshop on
federated learning 2020. The paper's choice of sites is left out, as in comparisons with it: train.participation draws.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.config import Table
from equipoise.contract.method import Method, Setting
from equipoise.losses import focal


class Options(Table):
    """The focal loss, which takes the place of train.loss."""

    gamma: float = Field(
        2.0, ge=0, description="exponent of 1 - p (FedIIC: 2); 0: every image counts alike, by train.loss: FedAvg"
    )


class FedFocalClient(FedAvgClient):
    """Trains by the focal loss."""

    @classmethod
    def ignores(cls, setting: Setting) -> tuple[str, ...]:
        return ("train.loss",) if setting.options.gamma else ()

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        if not self.options.gamma:
            return super().supervised(logits, labels)
        return focal(logits, labels, self.options.gamma)


METHOD = Method(
    server=FedAvgServer,
    client=FedFocalClient,
    paper=(
        "Sarkar et al., Fed-Focal Loss for imbalanced data classification in Federated Learning, IJCAI workshop 2020"
    ),
    year=2020,
    changes="loss (focal)",
    options=Options,
)
