"""FedLC: margins between pairs of classes, larger for classes that are rare at the site, calibrate its logits.

Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.config import Table
from equipoise.contract.method import Method, Setting
from equipoise.losses import fedlc


class Options(Table):
    """FedLC's one number, for which its paper names no value. The calibrated loss takes the place of train.loss."""

    tau: float = Field(1.0, ge=0, description="scale of the margins tau n^(-1/4); 0: the loss of train.loss, FedAvg")


class FedLCClient(FedAvgClient):
    """Trains by the calibrated cross entropy; classes that it lacks take no part in it."""

    @classmethod
    def ignores(cls, setting: Setting) -> tuple[str, ...]:
        return ("train.loss",) if setting.options.tau else ()

    @classmethod
    def decays_absent(cls, setting: Setting) -> bool:
        return setting.options.tau > 0

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        if not self.options.tau:
            return super().supervised(logits, labels)
        return fedlc(logits, labels, self.class_counts, self.options.tau)


METHOD = Method(
    server=FedAvgServer,
    client=FedLCClient,
    paper="Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022",
    year=2022,
    changes="loss (margins from class counts)",
    options=Options,
)
