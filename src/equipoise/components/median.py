"""The server takes the median of each weight over sites, so that less than half of them cannot move it far."""

from __future__ import annotations

from typing import Any, ClassVar

from equipoise.aggregation import coordinate_median
from equipoise.components._merging import merged_by_entry
from equipoise.components._robust import RobustMerging
from equipoise.contract.component import ServerSide
from equipoise.contract.protocol import Replies, Tensors


class MedianServer(ServerSide):
    """Merges each number by itself."""

    def merge(self, updates: Replies, number: int) -> Tensors:
        return merged_by_entry(updates, coordinate_median)


class Median(RobustMerging):
    """Coordinate-wise median."""

    name: ClassVar[str] = "median"
    paper: ClassVar[str] = "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018"
    rank: ClassVar[int] = 54
    Server: ClassVar[type[ServerSide]] = MedianServer

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return {"train.aggregation": "the median counts all sites alike"}


COMPONENT = Median
