"""The server keeps the models that lie nearest to their neighbours, and leaves the others out (Krum, multi-Krum)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from equipoise.aggregation import krum_scores, share_of_sites
from equipoise.components._merging import average_by, site_weights
from equipoise.components._robust import RobustMerging
from equipoise.contract.component import ServerSide
from equipoise.contract.protocol import Replies, Tensors
from equipoise.nets import all_but


class KrumServer(ServerSide):
    """Scores every site by its distances to the others."""

    def setup(self) -> None:
        travels = self.server.state.model
        parameters = all_but(self.server.new_net(), "statistics")
        self.parameters = tuple(name for name in parameters if name in travels)

    def merge(self, updates: Replies, number: int) -> Tensors:
        sites = len(updates)
        liars = min(share_of_sites(self.options.liars, sites), max(sites - 3, 0) // 2)
        kept = min(self.options.keep or sites - liars, sites)
        order = krum_scores(self.distances(updates), liars).argsort(stable=True)
        chosen = set(order[:kept].tolist())
        weights = site_weights(updates, self.weighting)
        return average_by([weight if place in chosen else 0.0 for place, weight in enumerate(weights)], updates)

    def distances(self, updates: Replies) -> Tensor:
        """Squared distances (K, K) of the sites' parameters, float64; one entry of all sites at a time."""
        total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
        for name in self.parameters:
            own = torch.stack([reply["model"][name] for reply in updates]).flatten(1).double()
            total += torch.stack([(own - one).square().sum(1) for one in own]).cpu()
        return total


class Krum(RobustMerging):
    """Krum and multi-Krum."""

    name: ClassVar[str] = "krum"
    paper: ClassVar[str] = "Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017"
    rank: ClassVar[int] = 56
    limit: ClassVar[Mapping[str, Any]] = {"liars": 0, "keep": 0}
    in_short: ClassVar[tuple[str, ...]] = ("krum.keep=2", "train.epochs=2")
    Server: ClassVar[type[ServerSide]] = KrumServer

    liars: float = Field(
        0.2,
        ge=0,
        lt=0.5,
        description="share of the sites that may lie, rounded down; of n sites (n - 3) / 2 count at most",
    )
    keep: NonNegativeInt = Field(
        1, description="models that are averaged: 1 is Krum, more is multi-Krum; 0: all but the share that may lie"
    )

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return {"train.aggregation": "krum.keep is 1, and one model needs no weights"} if self.keep == 1 else {}


COMPONENT = Krum
