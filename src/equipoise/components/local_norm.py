"""Norm layers stay at each site, weights and statistics (FedBN)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import ClassVar

from equipoise.contract.component import Component


class LocalNorm(Component):
    """Norm layers stay at each site, weights and statistics.

    A site that has not trained yet is measured with the initial or loaded values of these entries.
    """

    name: ClassVar[str] = "local-norm"
    paper: ClassVar[str] = "Li et al., FedBN, ICLR 2021"
    stays: ClassVar[tuple[str, ...]] = ("norm", "statistics")
    rank: ClassVar[int] = 10
    image_by_image: ClassVar[bool] = True

    def needs(self) -> AbstractSet[str]:
        return {"model", "sites", "norm layers"}

    def gives(self) -> AbstractSet[str]:
        return {"norm at sites"}

    def lacks(self) -> AbstractSet[str]:
        return {"whole model"}


COMPONENT = LocalNorm
