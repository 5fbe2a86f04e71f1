"""Each epoch draws every class of the site equally often, with replacement (BalanceFL's balanced sampling)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.contract.component import Component, SiteSide


class BalancedDrawsSite(SiteSide):
    """As many draws as there are images, each class as likely as every other."""

    def order(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        chances = 1 / labels.bincount().double()
        return torch.multinomial(chances[labels], len(labels), replacement=True, generator=generator)


class BalancedDraws(Component):
    """Class-balanced draws."""

    name: ClassVar[str] = "balanced-draws"
    paper: ClassVar[str] = "Shuai et al., BalanceFL, IPSN 2022"
    rank: ClassVar[int] = 12
    Site: ClassVar[type[SiteSide]] = BalancedDrawsSite

    def holds(self) -> AbstractSet[str]:
        return {"draws"}

    def needs(self) -> AbstractSet[str]:
        return {"image labels"}


COMPONENT = BalancedDraws
