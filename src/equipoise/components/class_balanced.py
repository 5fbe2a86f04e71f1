"""Class weights: each image counts in inverse proportion to the number of images of its class at the site (FedeAMC)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from equipoise.contract.component import Component, SiteSide
from equipoise.losses import class_balanced


class ClassBalancedSite(SiteSide):
    """Trains by this loss."""

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        return class_balanced(logits, labels, self.class_counts, self.options.power)


class ClassBalanced(Component):
    """Cross entropy with class weights."""

    name: ClassVar[str] = "class-balanced"
    paper: ClassVar[str] = "Wang et al., FedeAMC, IEEE TCCN 2022"
    loss_name: ClassVar[str] = "fedeamc"
    rank: ClassVar[int] = 20
    image_by_image: ClassVar[bool] = True
    limit: ClassVar[Mapping[str, Any]] = {"power": 0}
    Site: ClassVar[type[SiteSide]] = ClassBalancedSite

    power: float = Field(1.0, ge=0, description="exponent of the class counts; 0: plain cross entropy")

    def holds(self) -> AbstractSet[str]:
        return {"loss"} if self.power else set()

    def needs(self) -> AbstractSet[str]:
        return {"supervised"}


COMPONENT = ClassBalanced
