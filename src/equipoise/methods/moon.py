"""MOON: contrast between models. Features of local training are drawn to those of the global model, and away from those
of the site's own model of the round before.

Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.components._projection import projected_net
from equipoise.components.averaging import FedAvgClient, FedAvgServer, SharedNet
from equipoise.contract.config import Table
from equipoise.contract.method import Batch, Method, PerBatch
from equipoise.contract.protocol import Action, Payload
from equipoise.losses import model_contrastive
from equipoise.nets import Net


class Options(Table):
    """MOON's contrast; its paper tunes mu among 0.1, 1, 5 and 10."""

    mu: float = Field(1.0, ge=0, description="weight of the contrast (FedIIC: 10); 0: off, and no projection: FedAvg")
    temperature: PositiveFloat = Field(0.5, description="tau of the contrast")
    projection: int = Field(
        256, ge=0, description="size of the features after a two-layer projection, as in FedNPR's net; 0: no projection"
    )


class MoonNet(SharedNet):
    """The net with MOON's projection; without a contrast, the plain net."""

    def new_net(self) -> Net:
        options = self.setting.options
        return projected_net(self.setting, options.projection if options.mu else 0)


class MoonServer(MoonNet, FedAvgServer):
    """Averages as FedAvg does."""


class MoonClient(MoonNet, FedAvgClient):
    """Keeps its model of the round before, and compares features with it and with the received model, both frozen."""

    def build(self) -> None:
        super().build()
        if self.options.mu:
            self.received = self.new_net()
            self.scratch("received", self.reference(self.received))
            self.previous = self.new_net()
            self.keeps("previous", self.reference(self.previous))
            self.trained_before = self.keeps("trained_before", torch.zeros((), dtype=torch.bool))

    def train(self, message: Payload) -> Action:
        if not self.options.mu:
            return (yield from super().train(message))
        self.copy(self.net, self.received)
        if not self.trained_before:
            self.copy(self.net, self.previous)  # two equal models: the contrast has no gradient
        update = yield from super().train(message)
        self.copy(self.net, self.previous)
        self.trained_before.fill_(True)
        return update

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        """Features (n, D) of the two frozen models, for many batches at once."""
        if not self.options.mu:
            return {}
        return {
            "received_features": self.frozen_features(self.received, chunk),
            "previous_features": self.frozen_features(self.previous, chunk),
        }

    def frozen_features(self, net: Net, chunk: Batch) -> Tensor:
        """Features (n, D) of a frozen net, in the configured precision."""
        with self.precision():
            return net.features(chunk.image).float()

    def loss(self, batch: Batch, out: Any) -> Tensor:
        loss = super().loss(batch, out)
        if not self.options.mu:
            return loss
        return loss + self.options.mu * model_contrastive(
            out.features, batch.received_features, batch.previous_features, self.options.temperature
        )


METHOD = Method(
    server=MoonServer,
    client=MoonClient,
    paper="Li et al., Model-Contrastive Federated Learning, CVPR 2021",
    year=2021,
    changes="loss (contrast between models)",
    options=Options,
)
