"""IDA: the nearer a site's model is to the mean of all, the more it counts, so that outliers count little.

Yeganeh et al., Inverse Distance Aggregation for Federated Learning with Non-IID Data, DCL workshop at MICCAI 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equipoise.aggregation import inverse_distance_weights
from equipoise.components._merging import all_but, average_by, site_weights
from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.config import Table
from equipoise.contract.method import Batch, Method
from equipoise.contract.protocol import Action, Ask, Conversation, Evaluate, Payload, Replies, Tensors


class Options(Table):
    """Factors of a site's weight, multiplied. They take the place of train.aggregation."""

    distance: bool = Field(True, description="inverse L1 distance between the site's model and the mean of all")
    size: bool = Field(False, description="number of images, as in FedAvg")
    accuracy: bool = Field(False, description="inverse training accuracy, the paper's INTRAC: against overfitted sites")


class IDAServer(FedAvgServer):
    """Weighs the sites anew in every round."""

    def setup(self) -> None:
        super().setup()
        self.parameters = all_but(self.new_net(), "statistics")

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        updates = yield Ask("train", sites, model=self.state.model)
        self.state.model = average_by(self.weights(updates), updates)

    def weights(self, updates: Replies) -> list[float]:
        """Un-normalised weight of each site: the product of the chosen factors."""
        weights = torch.ones(len(updates), dtype=torch.float64)
        if self.options.distance:
            weights *= self.closeness(updates).cpu()
        if self.options.size:
            weights *= torch.tensor(site_weights(updates))
        if self.options.accuracy:
            chance = 1 / self.setting.num_classes
            weights /= torch.tensor(updates.values("accuracy")).clamp(min=chance)
        return weights.tolist()

    def closeness(self, updates: Replies) -> Tensor:
        """Inverse distance (K,) of each site's parameters to their plain mean; one model in memory at a time."""
        models: Iterator[Tensor] = (self.flat(reply["model"]) for reply in updates)
        return inverse_distance_weights(models, self.flat(average_by([1.0] * len(updates), updates)))

    def flat(self, model: Tensors) -> Tensor:
        """The parameters of a model as one vector; batch-norm statistics are of another scale, and left out."""
        return torch.cat([model[name].flatten() for name in self.parameters])


class IDAClient(FedAvgClient):
    """Trains as FedAvg does; measures its training accuracy where the server weighs by it."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": FedAvgClient.discloses["train"]
        | {"accuracy": "accuracy of the trained net on the local training images (only with ida.accuracy)"}
    }

    def train(self, message: Payload) -> Action:
        update = yield from super().train(message)
        if not self.options.accuracy:
            return update
        measured = yield Evaluate("train", {"trained": self.trained_logits})
        confusion = measured["trained"]["confusion"].double()
        return update | {"accuracy": float(confusion.trace() / confusion.sum())}

    def trained_logits(self, batch: Batch) -> Tensor:
        """Logits (B, C) of the net as it is now."""
        return self.predict("global", batch)


METHOD = Method(
    server=IDAServer,
    client=IDAClient,
    paper="Yeganeh et al., Inverse Distance Aggregation for Federated Learning with Non-IID Data, MICCAI DCL 2020",
    year=2020,
    changes="aggregation (inverse distance to the mean)",
    options=Options,
)
