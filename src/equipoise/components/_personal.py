"""Bases of personalised methods: sites that keep some groups of the net to themselves, and sites with a second net."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor, nn

from equipoise.components.averaging import FedAvgClient, SharedNet
from equipoise.contract.method import Batch
from equipoise.nets import all_but, entries_of


class PartialNet(SharedNet):
    """Some groups of the net travel; the others stay at the sites."""

    #: the groups that each site keeps to itself, of body, head, norm and statistics
    stays: ClassVar[tuple[str, ...]]

    def shared_entries(self, net: nn.Module) -> Iterable[str]:
        return all_but(net, *self.stays)


class PartialClient(PartialNet, FedAvgClient):
    """Keeps some groups of the net from round to round; the others are received and sent."""

    views = ("personal",)

    def build(self) -> None:
        super().build()
        self.keeps("personal", self.net, entries_of(self.net, *self.stays))


class TwoNetClient(FedAvgClient):
    """Keeps a personal net of the same kind beside the net that travels; the method says how each trains.

    Both nets draw their dropout from one stream of random numbers. Without dropout, a net that trains as in FedAvg or
    alone gives the same bits; with dropout, only the draws differ.
    """

    views = ("global", "personal")

    def build(self) -> None:
        super().build()
        self.personal = self.new_net()
        self.keeps("personal", self.personal)

    def predict(self, view: str, batch: Batch) -> Tensor:
        return self.workplace.logits(self.net if view == "global" else self.personal, batch.image)
