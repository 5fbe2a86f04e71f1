"""FedRS: a site scales down the logits of classes that it lacks, so that its training does not push them away.

Li and Zhan, FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data, KDD 2021.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.config import Table
from equipoise.contract.method import Method, Setting
from equipoise.losses import restricted_logits


class Options(Table):
    """FedRS's one number. The scaled logits go into whatever train.loss names (FedNPR: the balanced softmax)."""

    alpha: float = Field(
        0.5, ge=0, le=1, description="factor of the logits of missing classes (FedIIC: 0); 1: all alike, FedAvg"
    )


class FedRSClient(FedAvgClient):
    """Trains by the restricted softmax; predicts by the plain one."""

    @classmethod
    def decays_absent(cls, setting: Setting) -> bool:
        return setting.options.alpha == 0  # such a class's logit is 0, whatever its weights are

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.options.alpha < 1:
            logits = restricted_logits(logits, self.class_counts > 0, self.options.alpha)
        return super().supervised(logits, labels)


METHOD = Method(
    server=FedAvgServer,
    client=FedRSClient,
    paper=(
        "Li and Zhan, FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data, KDD 2021"
    ),
    year=2021,
    changes="loss (restricted softmax)",
    options=Options,
)
