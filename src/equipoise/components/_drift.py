"""What methods against client drift share (FedProx, SCAFFOLD, FedDyn): a tensor beside each parameter of the net, terms
that are added to gradients, and a server that knows what all sites together weigh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from equipoise.components._merging import site_weights
from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, Replies


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


def added(gradients: list[Tensor | None], terms: Sequence[Tensor], scale: float = 1.0) -> list[Tensor | None]:
    """gradients + scale * terms; a parameter without a gradient does not move, and needs no term."""
    pairs = [(gradient, term) for gradient, term in zip(gradients, terms) if gradient is not None]
    if not pairs:
        return gradients
    sums = iter(torch._foreach_add([g for g, _ in pairs], [t for _, t in pairs], alpha=scale))
    return [None if gradient is None else next(sums) for gradient in gradients]


class RosterServer(FedAvgServer):
    """Weighs all sites once: what they keep goes into the server's state by the share of those that took part."""

    def start(self, roster: Sequence[str]) -> Conversation:
        yield from super().start(roster)
        self.state.all_weights = float(len(roster))
        if self.setting.config.train.aggregation == "size":
            counted = yield Ask("count", roster)
            self.state.all_weights = sum(site_weights(counted))

    def participation(self, replies: Replies) -> float:
        """What the sites that answered weigh, of what all sites do: |S| / N, or their share of the images.

        The mean of a change over the sites that answered, times this, is its mean over all sites, for the others
        have not changed.
        """
        return sum(site_weights(replies, self.setting.config.train.aggregation)) / self.state.all_weights


class RosterClient(FedAvgClient):
    """Tells its size before the first round, where sites count by size."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        **FedAvgClient.discloses,
        "count": {"examples": "number of local training images (where train.aggregation is size)"},
    }

    def count(self, message: Payload) -> Payload:
        """The number of local training images."""
        return {"examples": int(self.class_counts.sum())}


class AnchoredClient(FedAvgClient):
    """Minimises loss + pull/2 |w - anchor|^2; the anchor is what the net held when it came."""

    @property
    def pull(self) -> float:
        """Strength of the pull; at 0 there is no anchor at all."""
        raise NotImplementedError

    def build(self) -> None:
        super().build()
        if self.pull:
            self.anchor = beside(self.net)
            self.scratch("anchor", self.anchor)

    def train(self, message: Payload) -> Action:
        if self.pull:
            self.set_anchor()
        return (yield from super().train(message))

    def set_anchor(self) -> None:
        """Before training: the anchor is the received net."""
        self.copy(self.net, self.anchor)

    @torch.no_grad()
    def drift(self) -> list[Tensor]:
        """w - anchor, for each parameter."""
        return list(torch._foreach_sub(list(self.net.parameters()), list(self.anchor.buffers())))

    def adjust(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """The pull's gradient on top: as a loss term it would cost a longer backward pass."""
        return added(gradients, self.drift(), self.pull) if self.pull else gradients
