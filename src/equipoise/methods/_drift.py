"""What methods against client drift share (FedProx, SCAFFOLD, FedDyn): a tensor beside each parameter of the net, terms
that are added to gradients, and a server that knows how many sites there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.engine.protocol import Action, Conversation, Payload, Replies
from equipoise.methods.fedavg import FedAvgClient, FedAvgServer


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
    """Counts the sites once: what they keep goes into the server's state by the share that took part."""

    def start(self, roster: Sequence[str]) -> Conversation:
        self.state.sites = len(roster)
        yield from super().start(roster)

    def participation(self, replies: Replies) -> float:
        """|S| / N: the share of all sites that answered."""
        return len(replies) / self.state.sites


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
