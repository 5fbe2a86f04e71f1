"""The nearer a site's model is to the mean of all, the more it counts, so that outliers count little (IDA)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.aggregation import inverse_distance_weights
from equipoise.components._merging import average_by, site_weights
from equipoise.contract.component import Batch, Component, Options, ServerSide, Sheet, SiteSide
from equipoise.contract.disclosed import Entry
from equipoise.contract.protocol import Evaluate, Payload, Replies, Tensors, Work
from equipoise.core.table import LATER
from equipoise.nets import all_but


class InverseDistanceServer(ServerSide):
    """Weighs the sites anew in every round."""

    def setup(self) -> None:
        travels = self.server.state.model
        parameters = all_but(self.server.new_net(), "statistics")
        self.parameters = tuple(name for name in parameters if name in travels)

    def merge(self, updates: Replies, number: int) -> Tensors:
        return average_by(self.weights(updates), updates)

    def weights(self, updates: Replies) -> list[float]:
        """Un-normalised weight of each site: the product of the chosen factors."""
        weights = torch.ones(len(updates), dtype=torch.float64)
        if self.options.distance:
            weights *= self.closeness(updates).cpu()
        if self.options.size:
            weights *= torch.tensor(site_weights(updates))
        if self.options.accuracy:
            chance = 1 / (len(updates) if self.options.floor == "sites" else self.setting.num_classes)
            accuracies = self.server.own_entries(self.options, updates).values("accuracy")
            weights /= torch.tensor(accuracies).clamp(min=chance)
        return weights.tolist()

    def closeness(self, updates: Replies) -> Tensor:
        """Inverse distance (K,) of each site's parameters to their plain mean; one model in memory at a time."""
        models: Iterator[Tensor] = (self.flat(reply["model"]) for reply in updates)
        return inverse_distance_weights(models, self.flat(average_by([1.0] * len(updates), updates)))

    def flat(self, model: Tensors) -> Tensor:
        """The parameters of a model as one vector; batch-norm statistics are of another scale, and left out."""
        return torch.cat([model[name].flatten() for name in self.parameters])


class InverseDistanceSite(SiteSide):
    """Measures its training accuracy where the server weighs by it."""

    def reply(self) -> Generator[Work, Any, Payload]:
        if not self.options.accuracy:
            return {}
        measured = yield Evaluate("train", {"trained": self.trained_logits})
        confusion = measured["trained"]["confusion"].double()
        return {"accuracy": float(confusion.trace() / confusion.sum())}

    def trained_logits(self, batch: Batch) -> Tensor:
        """Logits (B, C) of the current net."""
        return self.client.outputs(batch).logits


class Factors(Options):
    """Factors of a site's weight, multiplied."""

    distance: bool = Field(True, description="inverse L1 distance between the site's model and the mean of all")
    size: bool = Field(False, description="number of images, as in FedAvg")
    accuracy: bool = Field(False, description="inverse training accuracy, the paper's INTRAC: against overfitted sites")

    floor: Literal["classes", "sites"] = Field(
        "classes",
        description="least accuracy that counts: 1 / classes, which is chance, or 1 / sites, another reading of the "
        "paper's 1 / K",
        json_schema_extra=LATER,
    )


class InverseDistance(Factors, Component):
    """Inverse distance aggregation: factors of a site's weight, multiplied. They replace train.aggregation."""

    name: ClassVar[str] = "inverse-distance"
    paper: ClassVar[str] = "Yeganeh et al., IDA, MICCAI DCL 2020"
    rank: ClassVar[int] = 52
    limit: ClassVar[Mapping[str, Any]] = {"distance": False, "size": True}
    Site: ClassVar[type[SiteSide]] = InverseDistanceSite
    Server: ClassVar[type[ServerSide]] = InverseDistanceServer

    def holds(self) -> AbstractSet[str]:
        return {"merge"}

    def single_replies(self) -> str:
        return "it weighs each site by how far its model lies from the others'"

    def needs(self) -> AbstractSet[str]:
        return {"model", "sites"}

    def discloses(self) -> Sheet:
        if not self.accuracy:
            return {}
        return {"train": {"accuracy": Entry("accuracy of the trained net on the local training images", "share")}}

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        idle = {} if self.accuracy else {"floor": "accuracy is false"}
        return {"train.aggregation": "inverse-distance weighs the sites", **idle}


COMPONENT = InverseDistance
