"""APFL: each site predicts with a mixture of its personal and the global net's weights, and learns the share of each.

Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, arXiv 2003.13461, 2020. The weights are mixed, as in
the paper's Algorithm 1. A well-known re-implementation mixes the two nets' outputs, and adds 0.02 alpha to the slope of
alpha; its figures are those of another method.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from equipoise.components._personal import TwoNetClient
from equipoise.components.averaging import FedAvgServer
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Batch, Method, Phase
from equipoise.contract.summed import averaged


class Options(MethodOptions):
    """The mixture alpha * local + (1 - alpha) * global."""

    alpha: float = Field(0.5, ge=0, le=1, description="share of the site's own net at first; 0: all global")
    learn: Literal["round", "step", "never"] = Field(
        "round", description="when alpha learns: at the first step of each round (as released), at every step, or never"
    )

    def holds(self) -> AbstractSet[str]:
        return {"carrier"}

    def lacks(self) -> AbstractSet[str]:
        return {"plain forward", "plain loss"}


class APFLClient(TwoNetClient):
    """Trains the global net (w, `net`) as FedAvg does, and its own (v, `personal`) inside the mixture.

    Batch norm keeps the mixture's running statistics in the personal net, for nothing else uses them.
    """

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": TwoNetClient.discloses["train"]
        | {"model": averaged("the global net's weights and batch-norm statistics after local training")}
    }

    def build(self) -> None:
        super().build()
        self.phase("main", {"net": self.net, "personal": self.personal})
        self.alpha = self.keeps("alpha", torch.tensor(self.options.alpha))
        self.alpha.requires_grad_(self.options.learn != "never")
        self.learns = self.scratch("learns", torch.tensor(1.0))

    def mixture(self) -> dict[str, Tensor]:
        """The weights alpha v + (1 - alpha) w; gradients reach v and alpha, not w."""
        pairs = zip(self.personal.named_parameters(), self.net.parameters())
        return {name: torch.lerp(w.detach(), v, self.alpha) for (name, v), w in pairs}

    def forward(self, batch: Batch) -> Any:
        """Features (B, D) and logits (B, C) of the global net, logits (B, C) of the mixture."""
        out = super().forward(batch)
        out.personal_logits = functional_call(self.personal, self.mixture(), (batch.image,))
        return out

    def loss(self, batch: Batch, out: Any) -> Tensor:
        return super().loss(batch, out) + self.supervised(out.personal_logits, batch.label)

    def step(self, batches: list[Batch], phase: Phase) -> Tensor:
        """w, v and alpha go down their gradients at the same point (Algorithm 1); alpha by plain descent."""
        if self.options.learn == "never":
            return super().step(batches, phase)
        (batch,) = batches
        loss = self.loss(batch, self.outputs(batch))
        *gradients, slope = torch.autograd.grad(loss, [*phase.optimiser.parameters, self.alpha], allow_unused=True)
        self.workplace.descend(phase, gradients)
        if slope is not None:  # without supervision (npr.supervised = false) nothing depends on the mixture
            with torch.no_grad():
                self.alpha.sub_(phase.optimiser.lr * self.learns * slope).clamp_(0, 1)
        if self.options.learn == "round":
            self.learns.zero_()
        return loss.detach()

    def predict(self, view: str, batch: Batch) -> Tensor:
        return self.outputs(batch).personal_logits if view == "personal" else super().predict(view, batch)


METHOD = Method(
    server=FedAvgServer,
    client=APFLClient,
    paper="Deng et al., Adaptive Personalized Federated Learning, arXiv 2003.13461, 2020",
    year=2020,
    changes="personalisation (learned mixture of two nets)",
    options=Options,
)
