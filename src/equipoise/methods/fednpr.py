"""FedNPR: FedAvg with a balanced softmax, and features held to prototypes of each class's sub-clusters, which each
site finds among its own images and keeps to itself.

Wicaksana, Yan and Cheng, Non-parametric Regularization for Class Imbalance Federated Medical Image
Classification, 2024 (arXiv 2407.12446). The regularisation, NPR, goes on top of any method: `npr.weight = 0.1`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.config import Config
from equipoise.contract.method import Batch, Client, Method
from equipoise.contract.protocol import Action, Payload, Scan, Tensors, Work
from equipoise.core.errors import UserError
from equipoise.losses import subcluster_regularisation, subcluster_scores
from equipoise.nets import Net
from equipoise.prototypes import update_subclusters

ABSENT = -1e4
"""Score of a class without sub-clusters: below every other, yet finite, as is then the loss of its images."""


class NprClient(Client):
    """Adds NPR to the client that stands behind it in the list of bases."""

    def build(self) -> None:
        super().build()
        nets = [part for module in self.modules() for part in module.modules() if isinstance(part, Net)]
        if not nets:
            raise self._unfit("has no net with features")
        shape = (self.num_classes, self.config.npr.clusters, nets[0].feature_size)
        first = self.setting.seeded("subclusters", lambda: nn.init.trunc_normal_(torch.empty(shape), std=0.02))
        self.subclusters = self.keeps("subclusters", first)
        self.clustered = self.keeps("clustered", torch.zeros(self.num_classes, dtype=torch.bool))

    def train(self, message: Payload) -> Action:
        yield from self.find_subclusters()
        return (yield from super().train(message))

    def find_subclusters(self) -> Generator[Work, Any, None]:
        """Find the sub-clusters of the local training images, as the received model sees them (Eqs. 1 and 2)."""
        npr = self.config.npr
        seen = yield Scan("train", self.npr_sample, view=npr.view, reduce="concatenate")
        draws = self.random("subclusters")
        self.subclusters.copy_(
            update_subclusters(seen["features"], seen["labels"], self.subclusters, npr.cluster, draws)
        )
        # One image makes no sub-cluster: its class keeps its first, random prototypes, which must not attract.
        self.clustered.copy_(self.class_counts > 1)

    def npr_sample(self, batch: Batch) -> Tensors:
        """Features (B, D) and labels (B,) of a batch."""
        return {"features": self.npr_features(batch, self.outputs(batch)), "labels": batch.label}

    def npr_features(self, batch: Batch, out: Any) -> Tensor:
        """The features (B, D) among the outputs of the method's forward pass."""
        found = getattr(out, "features", None)
        count = len(batch.label if hasattr(batch, "label") else batch.image)  # new images have no label
        expected = (count, self.subclusters.shape[-1])
        if found is None or found.shape != expected:
            shape = "without features" if found is None else f"with features of shape {tuple(found.shape)}"
            raise self._unfit(f"has a forward pass {shape}, not {expected}")
        return found

    def npr_loss(self, batch: Batch, out: Any) -> Tensor:
        """L_npr (Eq. 3) over the classes that have sub-clusters here."""
        npr = self.config.npr
        features = self.npr_features(batch, out)
        return subcluster_regularisation(
            features, batch.label, self.subclusters, npr.normalise, npr.temperature, self.clustered
        )

    def loss(self, batch: Batch, out: Any) -> Tensor:
        """L_sup + lambda L_npr (Eq. 5), where L_sup is whatever the method minimises."""
        return super().loss(batch, out) + self.config.npr.weight * self.npr_loss(batch, out)

    def _unfit(self, why: str) -> UserError:
        return UserError(f"npr.weight = {self.config.npr.weight:g}: the method {self.config.method} {why}; set it to 0")


class PrototypeClient(NprClient):
    """Trains by NPR alone and predicts by the nearest prototype (Table IV, without global supervision)."""

    views = ("personal",)

    def loss(self, batch: Batch, out: Any) -> Tensor:
        return self.config.npr.weight * self.npr_loss(batch, out)

    def adapt(self) -> Generator[Work, Any, None]:
        """Find the sub-clusters anew: those kept belong to the model of the round before."""
        yield from super().adapt()
        yield from self.find_subclusters()

    def ready(self) -> Generator[Work, Any, None]:
        """Find the sub-clusters anew: those of this round belong to the model before its training."""
        yield from super().ready()
        yield from self.find_subclusters()

    def predict(self, view: str, batch: Batch) -> Tensor:
        npr = self.config.npr
        features = self.npr_sample(batch)["features"]
        scores = subcluster_scores(features, self.subclusters, npr.normalise, npr.temperature, self.clustered)
        return scores.masked_fill(~self.clustered, ABSENT)


def with_npr(client: type[Client], config: Config) -> type[Client]:
    """The client with NPR where the config asks for it; without, the very same class."""
    if config.npr.weight == 0:
        return client
    addition = NprClient if config.npr.supervised else PrototypeClient
    return type(f"{client.__name__}WithNpr", (addition, client), {"__doc__": client.__doc__})


PAPER = (
    "Wicaksana et al., Non-parametric Regularization for Class Imbalance Federated Medical Image Classification, "
    "arXiv 2407.12446, 2024"
)
DEFAULTS = {"train": {"loss": "balanced_softmax"}, "npr": {"weight": 0.1}}

METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=PAPER,
    year=2024,
    changes="loss (balanced softmax, sub-cluster prototypes)",
    defaults=DEFAULTS,
)
