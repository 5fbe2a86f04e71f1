"""Ditto: each site trains a personal net beside the global one, and a proximal term holds it to the global net that it
received.

Li, Hu, Beirami and Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equipoise.components._drift import added, beside
from equipoise.components._personal import TwoNetClient
from equipoise.components.averaging import FedAvgServer
from equipoise.contract.client import Gradients
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Batch, Method
from equipoise.contract.modules import copy_entries
from equipoise.contract.protocol import Action, Payload
from equipoise.contract.summed import averaged


class Options(MethodOptions):
    """Ditto's one number; its paper tunes it among 0.1, 1 and 2."""

    regularisation: float = Field(
        1.0, ge=0, description="lambda, the pull of personal nets to the received one; 0: they learn alone"
    )

    def holds(self) -> AbstractSet[str]:
        return {"carrier"}

    def lacks(self) -> AbstractSet[str]:
        return {"plain forward", "plain loss"}


class DittoClient(TwoNetClient):
    """Trains the global net (w, `net`) as FedAvg does, and its own (v, `personal`) in the same steps."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": TwoNetClient.discloses["train"]
        | {"model": averaged("the global net's weights and batch-norm statistics after local training")}
    }

    def build(self) -> None:
        super().build()
        self.phase("main", {"net": self.net, "personal": self.personal})
        self.received = beside(self.net)
        self.scratch("received", self.received)

    def train(self, message: Payload) -> Action:
        copy_entries(self.net, self.received)
        return (yield from super().train(message))

    def forward(self, batch: Batch) -> Any:
        """Features (B, D) and logits (B, C) of the global net, logits (B, C) of the personal one."""
        out = super().forward(batch)
        out.personal_logits = self.personal(batch.image)
        return out

    def loss(self, batch: Batch, out: Any) -> Tensor:
        return super().loss(batch, out) + self.supervised(out.personal_logits, batch.label)

    def adjust(self, gradients: Gradients) -> Gradients:
        """The gradient of lambda/2 |v - w|^2 on top, w the received model."""
        if not self.options.regularisation:
            return gradients
        personal: list[Tensor] = list(self.personal.parameters())
        with torch.no_grad():
            apart = list(torch._foreach_sub(personal, list(self.received.buffers())))
        return added(gradients, personal, apart, self.options.regularisation)


METHOD = Method(
    server=FedAvgServer,
    client=DittoClient,
    paper="Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021",
    year=2021,
    changes="personalisation (second net held to the global one)",
    options=Options,
)
