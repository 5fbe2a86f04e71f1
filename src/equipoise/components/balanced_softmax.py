"""Balanced softmax: the logarithm of each class's share of the site's images is added to its logit."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from equipoise.contract.component import Component, SiteSide
from equipoise.losses import balanced_softmax

#: from this factor on, a class that the site lacks has a share of 1e-9 ** gamma, less than weight decay weighs
FEW_LEFT = 0.5


class BalancedSoftmaxSite(SiteSide):
    """Trains by this loss."""

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        return balanced_softmax(logits, labels, self.class_counts, self.options.gamma)


class BalancedSoftmax(Component):
    """Balanced softmax."""

    name: ClassVar[str] = "balanced-softmax"
    paper: ClassVar[str] = "Ren et al., Balanced Meta-Softmax, NeurIPS 2020"
    loss_name: ClassVar[str] = "balanced_softmax"
    rank: ClassVar[int] = 20
    image_by_image: ClassVar[bool] = True
    limit: ClassVar[Mapping[str, Any]] = {"gamma": 0}
    Site: ClassVar[type[SiteSide]] = BalancedSoftmaxSite

    gamma: float = Field(1.0, ge=0, description="factor of the logarithms; 0: plain cross entropy")

    def holds(self) -> AbstractSet[str]:
        return {"loss"} if self.gamma else set()

    def lacks(self) -> AbstractSet[str]:
        return {"absent classes"} if self.gamma >= FEW_LEFT else set()

    def needs(self) -> AbstractSet[str]:
        return {"supervised"}


COMPONENT = BalancedSoftmax
