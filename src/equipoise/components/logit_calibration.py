"""Logit calibration: margins between pairs of classes, larger for classes that are rare at the site (FedLC)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from equipoise.contract.component import Component, SiteSide
from equipoise.losses import fedlc


class LogitCalibrationSite(SiteSide):
    """Trains by this loss."""

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        return fedlc(logits, labels, self.class_counts, self.options.tau)


class LogitCalibration(Component):
    """FedLC's calibrated logits."""

    name: ClassVar[str] = "logit-calibration"
    paper: ClassVar[str] = "Zhang et al., FedLC, ICML 2022"
    loss_name: ClassVar[str] = "fedlc"
    rank: ClassVar[int] = 20
    Site: ClassVar[type[SiteSide]] = LogitCalibrationSite

    tau: float = Field(1.0, ge=0, description="factor of the margins n^(-1/4); 0: cross entropy over classes present")

    def holds(self) -> AbstractSet[str]:
        return {"loss"}

    def needs(self) -> AbstractSet[str]:
        return {"supervised"}

    def lacks(self) -> AbstractSet[str]:
        return {"absent classes", "all classes"}


COMPONENT = LogitCalibration
