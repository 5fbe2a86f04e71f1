"""Shared by components against client drift: a tensor beside each parameter, extra terms of gradients, and a server
that knows the total weight of all sites."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.components._merging import site_weights
from equipoise.contract.client import Gradients
from equipoise.contract.component import ServerSide, Sheet, SiteSide
from equipoise.contract.disclosed import Entry
from equipoise.contract.modules import copy_entries
from equipoise.contract.protocol import Conversation, Payload, Replies
from equipoise.contract.summed import added as summed

#: what a site tells once, where sites count by size
COUNT_DISCLOSURE: Sheet = {
    "count": {"examples": summed(Entry("number of local training images (where train.aggregation is size)", "images"))}
}


def beside(net: nn.Module) -> nn.Module:
    """A module that holds zeros for each parameter of a net, as buffers: same names, order, shapes and layout."""
    zeros = nn.Module()
    for name, parameter in net.named_parameters():
        *path, leaf = name.split(".")
        owner = zeros
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(leaf, torch.zeros_like(parameter))
    return zeros


def added(gradients: Gradients, parameters: Iterable[Tensor], terms: Sequence[Tensor], scale: float = 1.0) -> Gradients:
    """Gradients + scale * terms, a term for each parameter; one without a gradient does not move, and needs no term."""
    pairs = [(parameter, term) for parameter, term in zip(parameters, terms, strict=True) if parameter in gradients]
    if not pairs:
        return gradients
    sums = torch._foreach_add([gradients[p] for p, _ in pairs], [term for _, term in pairs], alpha=scale)
    return gradients | {parameter: total for (parameter, _), total in zip(pairs, sums)}


class RosterServer(ServerSide):
    """Weighs all sites once: what they keep goes into the server's state by the share of those that took part."""

    def start(self, roster: Sequence[str]) -> Conversation:
        self.state.all_weights = float(len(roster))
        if self.weighting == "size":
            counted = yield self.ask("count", roster)
            self.state.all_weights = sum(site_weights(counted))

    def participation(self, replies: Replies) -> float:
        """What the sites that answered weigh, of what all sites do: |S| / N, or their share of the images.

        The mean of a change over the sites that answered, times this, is its mean over all sites, for the others
        have not changed.
        """
        return sum(site_weights(replies, self.weighting)) / self.state.all_weights


class RosterSite(SiteSide):
    """Tells its size before the first round, where sites count by size."""

    def count(self, message: Payload) -> Payload:
        """The number of local training images."""
        return {"examples": self.client.workplace.examples}


class AnchoredSite(SiteSide):
    """Minimises loss + pull/2 |w - anchor|^2; the anchor is what the net held when it came."""

    pull: float

    def build(self) -> None:
        self.anchor = beside(self.client.net)
        self.scratch("anchor", self.anchor)

    def begin(self, message: Payload) -> Any:
        copy_entries(self.client.net, self.anchor)
        yield from ()

    @torch.no_grad()
    def drift(self) -> list[Tensor]:
        """w - anchor, for each parameter."""
        weights: list[Tensor] = list(self.client.net.parameters())
        return list(torch._foreach_sub(weights, list(self.anchor.buffers())))

    def adjust(self, gradients: Gradients) -> Gradients:
        """The pull's gradient on top: as a loss term it would cost a longer backward pass."""
        return added(gradients, self.client.net.parameters(), self.drift(), self.pull)
