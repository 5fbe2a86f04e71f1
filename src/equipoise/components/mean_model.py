"""Also reports the mean of all models that travel as a global model; norm layers then leave the sites.

FedIIC measured PRR in this way in its Table 1.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from torch import Tensor

from equipoise.components._merging import average
from equipoise.contract.component import Batch, Component, Message, ServerSide, Sheet, SiteSide
from equipoise.contract.modules import share
from equipoise.contract.protocol import Payload, Replies, Tensors, Work
from equipoise.contract.summed import averaged
from equipoise.nets import entries_of


class MeanModelServer(ServerSide):
    """Averages what travels, and the norm layers that stay."""

    def setup(self) -> None:
        self.state.global_model = dict(self.server.new_net().state_dict())

    def predicting(self) -> Message:
        return {"global_model": self.state.global_model}

    def after(self, number: int, updates: Replies, before: Tensors, model: Tensors) -> Tensors:
        mean = average(updates, "model", self.weighting) | average(updates, "norm", self.weighting)
        self.state.global_model = mean
        return model


class MeanModelSite(SiteSide):
    """Sends its norm layers along, and predicts the global view by the mean."""

    def build(self) -> None:
        self.mean = self.client.reference(self.client.new_net())
        self.receives("global_model", self.mean)
        self.private = entries_of(self.client.carrier, *self.client.staying())

    def reply(self) -> Generator[Work, Any, Payload]:
        yield from ()
        return {"norm": share(self.client.carrier, self.private)}

    def predicts(self, view: str) -> bool:
        return view == "global"

    def predict(self, view: str, batch: Batch) -> Tensor:
        return self.client.classified(self.client.workplace.logits(self.mean, batch.image))


class MeanModel(Component):
    """A global view of personal models."""

    name: ClassVar[str] = "mean-model"
    paper: ClassVar[str] = "Wu et al., FedIIC, MICCAI 2023 (Table 1)"
    rank: ClassVar[int] = 65
    Site: ClassVar[type[SiteSide]] = MeanModelSite
    Server: ClassVar[type[ServerSide]] = MeanModelServer

    def needs(self) -> AbstractSet[str]:
        return {"model", "norm at sites"}

    def discloses(self) -> Sheet:
        text = "batch-norm weights and statistics of the net that travels, after local training"
        return {"train": {"norm": averaged(text)}}

    def views(self, views: tuple[str, ...]) -> tuple[str, ...]:
        return ("global", "personal")


COMPONENT = MeanModel
