"""FedNH: the head's class vectors (prototypes) start evenly spread over the sphere and are frozen at sites. After each
round the server moves them a little towards the classes' mean features.

Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.components._cosine import SCALE, VECTORS, CosineClient, CosineServer, with_cosine_head
from equipoise.components._merging import class_sums, mean_by_class
from equipoise.components.averaging import SharedNet
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.disclosed import Entry
from equipoise.contract.method import Batch, Method
from equipoise.contract.protocol import Action, Payload, Replies, Scan, Tensors
from equipoise.contract.summed import added, averaged, averaged_by_class
from equipoise.nets import Net
from equipoise.prototypes import orthogonal_frame, simplex_frame

FRAMES = {"orthogonal": orthogonal_frame, "simplex": simplex_frame}


class Options(MethodOptions):
    """FedNH's prototypes; the defaults are the released ones."""

    rho: float = Field(
        0.9, ge=0, le=1, description="share of the prototypes kept in each round (FedBM: 0.9 too); 1: they never move"
    )
    start: Literal["orthogonal", "simplex"] = Field(
        "orthogonal", description="first prototypes: at right angles (as released), or as far apart as can be"
    )
    scale: PositiveFloat = Field(
        20.0, description="initial factor of cosines (released: 20 for its ResNet, 1 for its small net)"
    )
    learn_scale: bool = Field(True, description="train the scale with the net")

    def holds(self) -> AbstractSet[str]:
        return {"head", "merge"}

    def needs(self) -> AbstractSet[str]:
        return {"pooled features"}

    def lacks(self) -> AbstractSet[str]:
        return {"class head", "whole model"}


class FedNHNet(SharedNet):
    """The net with its first prototypes."""

    def new_net(self) -> Net:
        setting = self.setting
        net, options = setting.new_net(), setting.options
        frame = FRAMES[options.start]
        prototypes = setting.seeded("prototypes", lambda: frame(setting.num_classes, net.feature_size))
        return with_cosine_head(net, prototypes, options.scale)


class FedNHServer(FedNHNet, CosineServer):
    """Averages the nets, and infuses the prototypes with what sites found of their classes."""

    def new_vectors(self, updates: Replies) -> Tensors:
        if self.options.rho == 1:
            return {}
        means, found = mean_by_class(updates, "prototypes", self.setting.config.train.aggregation)
        return {VECTORS: smoothed(self.state.model[VECTORS], means, found, self.options.rho)}


def smoothed(prototypes: Tensor, means: Tensor, found: Tensor, rho: float) -> Tensor:
    """Unit prototypes (C, D) moved towards the directions of `means` (C, D); those of classes not `found` (C,) stay."""
    moved = F.normalize(rho * prototypes + (1 - rho) * F.normalize(means, dim=1), dim=1)
    return torch.where(found[:, None], moved, prototypes)


class FedNHClient(FedNHNet, CosineClient):
    """Trains the body under fixed prototypes, and tells where the features of its classes lie after that."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": {
            **CosineClient.discloses["train"],
            "model": averaged(
                "the body's weights and batch-norm statistics after local training, and the scale of the cosines"
            ),
            "prototypes": averaged_by_class(
                Entry("mean direction of each class's features; of a class with one image, that image's direction"),
            ),
            "class_counts": added(Entry("number of local training images of each class", "counts")),
        }
    }

    def build(self) -> None:
        self.fixed = (VECTORS,) if self.options.learn_scale else (VECTORS, SCALE)
        super().build()

    def train(self, message: Payload) -> Action:
        update = yield from super().train(message)
        if self.options.rho == 1:
            return update
        found = yield Scan("train", self.class_directions)
        return {**update, "prototypes": F.normalize(found["sums"], dim=1), "class_counts": found["counts"]}

    def class_directions(self, batch: Batch) -> Tensors:
        """Unit features of a batch, summed by class."""
        return class_sums(F.normalize(self.outputs(batch).features, dim=1), batch.label, self.num_classes)


METHOD = Method(
    server=FedNHServer,
    client=FedNHClient,
    paper="Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023",
    year=2023,
    changes="head (prototypes on the sphere), server step (they follow the class means)",
    options=Options,
)
