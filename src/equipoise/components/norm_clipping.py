"""The server shortens updates that are longer than usual before it averages them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.aggregation import weighted_mean_by_name
from equipoise.components._merging import site_weights
from equipoise.components._robust import RobustMerging
from equipoise.contract.component import ServerSide
from equipoise.contract.protocol import Replies, Reply, Tensors
from equipoise.nets import groups


class NormClippingServer(ServerSide):
    """Clips parameters and running statistics apart, for their scales differ."""

    def setup(self) -> None:
        travels = self.server.state.model
        statistics = set(groups(self.server.new_net())["statistics"])
        floats = [name for name, value in travels.items() if value.is_floating_point()]
        self.halves = [
            [name for name in floats if name not in statistics],
            [name for name in floats if name in statistics],
        ]

    def merge(self, updates: Replies, number: int) -> Tensors:
        shares = [self.shares(updates, names, fixed) for names, fixed in zip(self.halves, (self.options.largest, None))]
        return weighted_mean_by_name(self.clipped(updates, shares), site_weights(updates, self.weighting))

    def shares(self, updates: Replies, names: list[str], fixed: float | None) -> list[float]:
        """The remaining share of each site's update: 1 up to the largest length."""
        lengths = [self.length(reply, names) for reply in updates]
        largest = fixed if fixed is not None else self.options.multiple * median(lengths)
        return [largest / length if length > largest else 1.0 for length in lengths]

    def length(self, reply: Reply, names: list[str]) -> float:
        """How far a site has moved some entries of the model that it was sent."""
        sent = self.server.state.model
        moved = [torch.linalg.vector_norm(reply["model"][name].double() - sent[name].double()) for name in names]
        return float(torch.stack(moved).square().sum().sqrt()) if moved else 0.0

    def clipped(self, updates: Replies, shares: list[list[float]]) -> Iterator[Tensors]:
        """The sites' models with shortened updates, one model in memory at a time."""
        sent: Mapping[str, Tensor] = self.server.state.model
        for place, reply in enumerate(updates):
            model = dict(reply["model"])
            for part, left in zip(self.halves, shares):
                if left[place] < 1:
                    model |= {name: torch.lerp(sent[name], model[name], left[place]) for name in part}
            yield model


class NormClipping(RobustMerging):
    """Norm clipping."""

    name: ClassVar[str] = "norm-clipping"
    paper: ClassVar[str] = "Sun et al., Can You Really Backdoor Federated Learning?, 2019"
    rank: ClassVar[int] = 57
    limit: ClassVar[Mapping[str, Any]] = {"multiple": 1e9}
    Server: ClassVar[type[ServerSide]] = NormClippingServer

    multiple: PositiveFloat = Field(1.0, description="longest update, as a multiple of the sites' median length")
    largest: PositiveFloat | None = Field(
        None, description="longest update of the parameters; empty: the multiple of the median"
    )


COMPONENT = NormClipping
