"""Contrast between models (MOON).

Features are drawn to those of the received model, and away from those of the site's model of the round before.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.contract.client import PerBatch
from equipoise.contract.component import Batch, Component, SiteSide
from equipoise.contract.modules import copy_entries
from equipoise.contract.protocol import Payload, Work
from equipoise.losses import model_contrastive
from equipoise.nets import Net


class ModelContrastSite(SiteSide):
    """Keeps its model of the round before, and compares features with it and with the received model, both frozen."""

    def build(self) -> None:
        self.received = self.client.new_net()
        self.scratch("received", self.client.reference(self.received))
        self.previous = self.client.new_net()
        self.keeps("previous", self.client.reference(self.previous))
        self.trained_before = self.keeps("trained_before", torch.zeros((), dtype=torch.bool))

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        copy_entries(self.client.net, self.received)
        if not self.trained_before:
            copy_entries(self.client.net, self.previous)  # two equal models: the contrast has no gradient
        yield from ()

    def reply(self) -> Generator[Work, Any, Payload]:
        copy_entries(self.client.net, self.previous)
        self.trained_before.fill_(True)
        yield from ()
        return {}

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        """Features (n, D) of the two frozen models, for many batches at once."""
        return {
            "received_features": self.frozen_features(self.received, chunk),
            "previous_features": self.frozen_features(self.previous, chunk),
        }

    def frozen_features(self, net: Net, chunk: Batch) -> Tensor:
        """Features (n, D) of a frozen net, in the configured precision."""
        with self.client.workplace.precision():
            return net.features(chunk.image).float()

    def loss(self, batch: Batch, out: Any, loss: Tensor) -> Tensor:
        return loss + self.options.mu * model_contrastive(
            out.features, batch.received_features, batch.previous_features, self.options.temperature
        )


class ModelContrast(Component):
    """Model contrast."""

    name: ClassVar[str] = "model-contrast"
    paper: ClassVar[str] = "Li et al., MOON, CVPR 2021"
    rank: ClassVar[int] = 45
    image_by_image: ClassVar[bool] = True
    limit: ClassVar[Mapping[str, Any]] = {"mu": 0}
    Site: ClassVar[type[SiteSide]] = ModelContrastSite

    mu: float = Field(1.0, ge=0, description="weight of the contrast")
    temperature: PositiveFloat = Field(0.5, description="tau of the contrast")

    def needs(self) -> AbstractSet[str]:
        return {"model", "net trains", "plain features", "one training ask", "pooled features"}


COMPONENT = ModelContrast
