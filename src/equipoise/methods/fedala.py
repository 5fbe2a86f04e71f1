"""FedALA: before it trains, a site mixes the received model with its own, parameter by parameter, by weights that it
learns on its images.

Zhang, Hua, Wang, Song, Xue, Ma and Guan, FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI
2023.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Set as AbstractSet
from statistics import pstdev
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from equipoise.components._personal import TwoNetClient
from equipoise.components.averaging import FedAvgServer
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Batch, Method, Phase
from equipoise.contract.modules import copy_entries
from equipoise.contract.protocol import Action, Payload, Train, Work
from equipoise.nets import entries_of, groups


class Options(MethodOptions):
    """How a site learns its weights; the defaults are the paper's."""

    mixed: Literal["head", "all"] = Field(
        "head", description="parameters with weights; the received values replace the others (the paper's p = 1: head)"
    )
    rate: PositiveFloat = Field(1.0, description="step size of the weights (the paper's eta)")
    share: float = Field(0.8, gt=0, le=1, description="share of the training images that weights are learnt on")
    threshold: PositiveFloat = Field(
        0.1, description="the first time, weights are learnt until the last ten losses deviate less than this"
    )
    most_epochs: PositiveInt = Field(50, description="passes of the first time, at most; later there is one")

    def holds(self) -> AbstractSet[str]:
        return {"carrier"}

    def lacks(self) -> AbstractSet[str]:
        return {"plain forward", "net trains", "one loss"}


class FedALAClient(TwoNetClient):
    """Trains `net` from the mixture of the received model and its own, `personal`, which it then replaces."""

    def build(self) -> None:
        super().build()
        net, optimiser = self.net, self.setting.config.train.optimiser
        parameters = dict(net.named_parameters())
        chosen = entries_of(net, "head") if self.options.mixed == "head" else tuple(parameters)
        self.mixed = [name for name in parameters if name in chosen]
        plain = optimiser.model_copy(update={"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "keep": False})
        self.phase("weights", net, self.mixed, plain)
        self.share_of = {name: self.keeps(f"weight.{name}", torch.ones_like(parameters[name])) for name in self.mixed}
        self.received = {
            name: self.scratch(f"received.{name}", parameters[name].detach().clone()) for name in self.mixed
        }
        self.seen_loss = self.scratch("seen_loss", torch.zeros(()))
        #: 0: the site has not trained yet; 1: it has; 2: it has learnt weights, too
        self.stage = self.keeps("stage", torch.tensor(0))
        whole = self.workplace.order
        self.workplace.order = lambda labels, random: self.sampled(whole(labels, random))
        self.learning = False

    def sampled(self, order: Tensor) -> Tensor:
        """While weights are learnt, a share of the images."""
        return order[: max(int(self.options.share * len(order)), 1)] if self.learning else order

    def train(self, message: Payload) -> Action:
        if int(self.stage):
            yield from self.mix()
        yield Train()
        copy_entries(self.net, self.personal)
        self.stage.clamp_(min=1)
        return self.update()

    def mix(self) -> Generator[Work, Any, None]:
        """Start from own + weights * (received - own), clipped weights in [0, 1]; statistics of norm layers are own."""
        parameters = dict(self.net.named_parameters())
        for name in self.mixed:
            self.received[name].copy_(parameters[name])
        self.set_mixture()
        passes = self.options.most_epochs if int(self.stage) == 1 else 1
        losses: list[float] = []
        self.learning = True
        while len(losses) < passes and (len(losses) <= 10 or pstdev(losses[-10:]) >= self.options.threshold):
            self.seen_loss.zero_()
            yield Train(epochs=1, phase="weights")
            losses.append(float(self.seen_loss))
        self.learning = False
        copy_entries(self.personal, self.net, groups(self.net)["statistics"])
        self.stage.fill_(2)

    @torch.no_grad()
    def set_mixture(self) -> None:
        """Own + weights * (received - own), in place."""
        parameters, own = dict(self.net.named_parameters()), dict(self.personal.named_parameters())
        for name in self.mixed:
            parameters[name].copy_(torch.lerp(own[name], self.received[name], self.share_of[name]))

    def step(self, batches: list[Batch], phase: Phase) -> Tensor:
        """A step of the weights: their gradient is that of the mixture times (received - own)."""
        if phase is not self.workplace.phases["weights"]:
            return super().step(batches, phase)
        (batch,) = batches
        loss = self.loss(batch, self.outputs(batch))
        own = dict(self.personal.named_parameters())
        gradients = torch.autograd.grad(loss, phase.optimiser.parameters, allow_unused=True)
        with torch.no_grad():
            for name, gradient in zip(self.mixed, gradients, strict=True):
                if gradient is not None:
                    apart = self.received[name] - own[name]
                    self.share_of[name].sub_(self.options.rate * gradient * apart).clamp_(0, 1)
            self.seen_loss.add_(loss.detach())
        self.set_mixture()
        return loss.detach()


METHOD = Method(
    server=FedAvgServer,
    client=FedALAClient,
    paper="Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023",
    year=2023,
    changes="personalisation (each site weighs the received parameters against its own)",
    options=Options,
)
