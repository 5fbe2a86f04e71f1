"""The running statistics of batch norm stay at each site; its weights travel (SiloBN)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import ClassVar

from equipoise.contract.component import Component


class LocalStatistics(Component):
    """The running statistics of batch norm stay at each site.

    A site that has not trained yet is measured with the initial or loaded values of these entries.
    """

    name: ClassVar[str] = "local-statistics"
    paper: ClassVar[str] = "Andreux et al., SiloBN, DART at MICCAI 2020"
    stays: ClassVar[tuple[str, ...]] = ("statistics",)
    rank: ClassVar[int] = 10
    image_by_image: ClassVar[bool] = True

    def needs(self) -> AbstractSet[str]:
        return {"model", "sites", "batch norm"}

    def lacks(self) -> AbstractSet[str]:
        return {"whole model"}


COMPONENT = LocalStatistics
