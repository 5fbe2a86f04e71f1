"""Focal loss: images that are already classified well count little."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from equipoise.contract.component import Component, SiteSide
from equipoise.losses import focal


class FocalSite(SiteSide):
    """Trains by this loss."""

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        return focal(logits, labels, self.options.gamma)


class Focal(Component):
    """The focal loss."""

    name: ClassVar[str] = "focal"
    paper: ClassVar[str] = "Lin et al., Focal Loss, ICCV 2017; FedFocal, 2020"
    loss_name: ClassVar[str] = "focal"
    rank: ClassVar[int] = 20
    image_by_image: ClassVar[bool] = True
    limit: ClassVar[Mapping[str, Any]] = {"gamma": 0}
    Site: ClassVar[type[SiteSide]] = FocalSite

    gamma: float = Field(2.0, ge=0, description="exponent of 1 - p; 0: plain cross entropy")

    def holds(self) -> AbstractSet[str]:
        return {"loss"} if self.gamma else set()

    def needs(self) -> AbstractSet[str]:
        return {"supervised"}


COMPONENT = Focal
