"""FedProto: sites keep personal nets and exchange only prototypes, the mean features of their classes. Each site pulls
its features towards the federation's prototypes and predicts by the nearest one.

Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.components._merging import class_means, class_sums, mean_by_class
from equipoise.components.averaging import SharedNet
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.disclosed import Entry
from equipoise.contract.method import Batch, Method, Server
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, PerSite, Scan, Tensors, Train, Value
from equipoise.contract.summed import added, averaged_by_class
from equipoise.losses import prototype_distance
from equipoise.methods.local import LocalClient


class Options(MethodOptions):
    """FedProto's weight and its way to predict. Neither PRR nor FedBM states what it used."""

    weight: float = Field(1.0, ge=0, description="lambda of the distance to the prototypes; 0: local learning")
    predict: Literal["prototype", "head"] = Field(
        "prototype", description="by the nearest prototype (the paper), or by the site's own head"
    )

    def holds(self) -> AbstractSet[str]:
        return {"merge", "carrier"}

    def needs(self) -> AbstractSet[str]:
        return {"pooled features"}

    def lacks(self) -> AbstractSet[str]:
        return {"model", "whole model", "one model", "class head", "plain loss", "net trains"}


class FedProtoServer(SharedNet, Server):
    """Averages prototypes, class by class, over the sites that have the class."""

    def setup(self) -> None:
        size = self.new_net().feature_size
        self.state.prototypes = torch.zeros(self.setting.num_classes, size, device=self.setting.device)

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        """Sites count by their images of a class (the paper), or alike (train.aggregation "uniform", as released)."""
        replies = yield Ask("train", sites, **self.message())
        means, sent = mean_by_class(replies, "prototypes", self.setting.config.train.aggregation)
        self.state.prototypes = torch.where(sent[:, None], means, self.state.prototypes)

    def message(self) -> dict[str, Value | PerSite]:
        return {"prototypes": self.state.prototypes}


class FedProtoClient(LocalClient):
    """Trains its own net, held to the federation's prototypes."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": {
            "prototypes": averaged_by_class(
                Entry(
                    "mean feature of each class under the site's own net; of a class with one image, that image's "
                    "feature"
                ),
            ),
            "class_counts": added(Entry("number of local training images of each class", "counts")),
        }
    }

    def build(self) -> None:
        super().build()
        # A prototype of zeros belongs to a class that no site has sent yet.
        self.prototypes = self.receives("prototypes", torch.zeros(self.num_classes, self.net.feature_size))

    def train(self, message: Payload) -> Action:
        yield Train()
        found = yield Scan("train", self.class_features)
        return {"prototypes": class_means(found["sums"], found["counts"]), "class_counts": found["counts"]}

    def class_features(self, batch: Batch) -> Tensors:
        """Features of a batch, summed by class."""
        return class_sums(self.outputs(batch).features, batch.label, self.num_classes)

    def loss(self, batch: Batch, out: Any) -> Tensor:
        """Supervised loss + lambda * distance of the features to their prototypes."""
        loss = super().loss(batch, out)
        if not self.options.weight:
            return loss
        known = self.prototypes.any(1)
        return loss + self.options.weight * prototype_distance(out.features, batch.label, self.prototypes, known)

    def predict(self, view: str, batch: Batch) -> Tensor:
        """Minus the squared distances (B, C) to the prototypes; by the head as long as there are none."""
        out = self.outputs(batch)
        if self.options.predict == "head":
            return out.logits
        known = self.prototypes.any(1)
        distances = (out.features[:, None] - self.prototypes).square().sum(2)
        nearness = (-distances).masked_fill(~known, torch.finfo(distances.dtype).min)
        return torch.where(known.any(), nearness, out.logits)


METHOD = Method(
    server=FedProtoServer,
    client=FedProtoClient,
    paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022",
    year=2022,
    changes="prototypes in place of weights, personalisation (own nets)",
    options=Options,
)
