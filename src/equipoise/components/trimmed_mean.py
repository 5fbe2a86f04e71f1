"""The server leaves out the largest and smallest values of each weight over sites, and takes the mean of the rest."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from equipoise.aggregation import trimmed_mean
from equipoise.components._merging import merged_by_entry
from equipoise.components._robust import RobustMerging
from equipoise.contract.component import ServerSide
from equipoise.contract.protocol import Replies, Tensors


class TrimmedMeanServer(ServerSide):
    """Merges each number by itself."""

    def merge(self, updates: Replies, number: int) -> Tensors:
        return merged_by_entry(updates, partial(trimmed_mean, share=self.options.share))


class TrimmedMean(RobustMerging):
    """Coordinate-wise trimmed mean."""

    name: ClassVar[str] = "trimmed-mean"
    paper: ClassVar[str] = "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018"
    rank: ClassVar[int] = 55
    Server: ClassVar[type[ServerSide]] = TrimmedMeanServer

    share: float = Field(
        0.2, ge=0, lt=0.5, description="share of the sites cut off at each end, rounded down; 0: the plain mean"
    )

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return {"train.aggregation": "the trimmed mean counts all sites alike"}


COMPONENT = TrimmedMean
