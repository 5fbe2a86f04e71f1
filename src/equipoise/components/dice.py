"""Soft Dice beside the supervised loss: structures count alike, however few pixels they have; for segmentation.

The sum 1:1 with the pixels' loss is PRR's loss for prostates, whether that is cross entropy or CPA.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import Tensor

from equipoise.contract.component import Component, SiteSide
from equipoise.losses import soft_dice


class DiceSite(SiteSide):
    """Adds the term to every supervised loss."""

    def supervising(self, loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        return self.options.pixels * loss + self.options.weight * soft_dice(logits, labels, self.options.smooth)


class Dice(Component):
    """Soft Dice."""

    name: ClassVar[str] = "dice"
    paper: ClassVar[str] = "Milletari et al., V-Net, 3DV 2016"
    rank: ClassVar[int] = 22
    limit: ClassVar[Mapping[str, Any]] = {"weight": 0}
    Site: ClassVar[type[SiteSide]] = DiceSite

    weight: float = Field(1.0, ge=0, description="factor of the Dice loss")
    pixels: float = Field(1.0, ge=0, description="factor of the supervised loss of pixels; 0: Dice alone")
    smooth: float = Field(1.0, gt=0, description="pixels that are added to both sides of each ratio")

    @model_validator(mode="after")
    def _something_trains(self) -> Dice:
        if not self.weight and not self.pixels:
            raise ValueError("dice.weight = 0 and dice.pixels = 0 leave nothing to train by")
        return self

    def needs(self) -> AbstractSet[str]:
        return {"supervised", "masks"}


COMPONENT = Dice
