"""Shared by FedNH and FedETF: unit features are compared with class vectors, in place of the net's linear head. Sites
receive the vectors and do not train them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.components._merging import average
from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.protocol import Ask, Conversation, Replies, Tensors
from equipoise.nets import Net

VECTORS, SCALE = "head.class_vectors", "head.scale"
"""State-dict names of the class vectors and of the scale."""


class CosineHead(nn.Module):
    """Logits (B, C) of features (B, D): scale * u V^T, where u are the features, perhaps projected, at unit length.

    The class vectors V (C, d) have unit length too, as long as nothing trains them.
    """

    def __init__(self, class_vectors: Tensor, scale: float, projection: nn.Linear | None = None):
        super().__init__()
        self.in_features = class_vectors.shape[1] if projection is None else projection.in_features
        self.projection = nn.Identity() if projection is None else projection
        self.class_vectors = nn.Parameter(class_vectors)
        self.scale = nn.Parameter(class_vectors.new_tensor(scale))

    def forward(self, features: Tensor) -> Tensor:
        """Logits (B, C) of features (B, D)."""
        directions = F.normalize(self.projection(features), dim=1)
        return self.scale * (directions @ self.class_vectors.T)


def with_cosine_head(net: Net, class_vectors: Tensor, scale: float, projection: nn.Linear | None = None) -> Net:
    """The net, its head replaced by class vectors (C, d) of unit length."""
    net.add_module("head", CosineHead(class_vectors, scale, projection))
    return net


class CosineServer(FedAvgServer):
    """Sends the whole net, averages what sites train of it, and takes care of the class vectors itself."""

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        updates = yield Ask("train", sites, model=self.state.model)
        averaged = average(updates, "model", self.setting.config.train.aggregation)
        self.state.model = self.state.model | averaged | self.new_vectors(updates)

    def new_vectors(self, updates: Replies) -> Tensors:
        """The class vectors of the next round, by their name; none: they stay."""
        return {}


class CosineClient(FedAvgClient):
    """Trains and sends the net without its class vectors."""

    #: state-dict names that sites receive but neither train nor send
    fixed: tuple[str, ...] = (VECTORS,)

    def build(self) -> None:
        super().build()
        self.shared = tuple(entry for entry in self.shared if entry not in self.fixed)
        self.phase("main", self.net, self.shared)
