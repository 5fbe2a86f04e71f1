"""FedLC: margins between pairs of classes, larger for classes that are rare at the site, calibrate its logits.

Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.logit_calibration import LogitCalibration
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """FedLC's one number, for which its paper names no value. The calibrated loss takes the place of train.loss."""

    tau: float = Field(1.0, ge=0, description="scale of the margins tau n^(-1/4); 0: the loss of train.loss, FedAvg")

    def components(self) -> Sequence[Component]:
        return [LogitCalibration(tau=self.tau)] if self.tau else []


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022",
    year=2022,
    changes="loss (margins from class counts)",
    options=Options,
)
