"""pFedMe: each site's personal model minimises its loss plus a pull towards the global model (Moreau envelope). The
global model follows the personal models.

T Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from equipoise.components._drift import added
from equipoise.components._merging import step_towards
from equipoise.components._personal import TwoNetClient
from equipoise.components.averaging import FedAvgServer
from equipoise.contract.client import Gradients
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Batch, Method, Phase
from equipoise.contract.modules import copy_entries
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, Train
from equipoise.contract.summed import averaged
from equipoise.contract.tables import OptimiserConfig
from equipoise.nets import entries_of, groups


class Options(MethodOptions):
    """pFedMe's two levels, each by plain descent at its constant rate; train.optimiser plays no part.

    The released rates are for many thousand local steps: with them the global model moves some 40 times slower than
    FedAvg's. The defaults here suit rounds of one or a few epochs.
    """

    regularisation: PositiveFloat = Field(15.0, description="lambda, the pull of personal models to the global one")
    inner_steps: PositiveInt = Field(5, description="K, steps on a batch towards the personal model")
    personal_lr: PositiveFloat = Field(0.02, description="learning rate of these steps (released for MNIST: 0.1)")
    eta: PositiveFloat = Field(0.05, description="rate at which a copy of the global model follows (released: 0.005)")
    beta: PositiveFloat = Field(1.0, description="share of the sites' mean in the new global model (tuned: 2)")

    def holds(self) -> AbstractSet[str]:
        return {"carrier"}

    def lacks(self) -> AbstractSet[str]:
        return {"plain forward", "plain loss", "net trains", "one loss"}

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return dict.fromkeys(("train.optimiser", "train.schedule"), "pfedme sets its learning rates itself")


class PFedMeServer(FedAvgServer):
    """Moves the global model by beta towards the mean of the sites' copies."""

    def setup(self) -> None:
        super().setup()
        self.statistics = frozenset(groups(self.new_net())["statistics"])

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        updates = yield Ask("train", sites, model=self.model_for(sites))
        mean = self.merge(updates, number)
        self.state.model = step_towards(self.state.model, mean, self.options.beta, self.statistics)


class PFedMeClient(TwoNetClient):
    """Trains the personal net (theta), and lets its copy of the global one (w, `net`) follow."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": TwoNetClient.discloses["train"]
        | {"model": averaged("the site's copy of the global weights after local training, and batch-norm statistics")}
    }

    def build(self) -> None:
        super().build()
        plain = OptimiserConfig(name="sgd", lr=self.options.personal_lr, momentum=0.0)
        self.phase("main", self.personal, optimiser=plain, scheduled=False)

    def train(self, message: Payload) -> Action:
        copy_entries(self.net, self.personal)
        yield Train()
        # Only the personal net sees images, so its statistics are the only ones.
        copy_entries(self.personal, self.net, entries_of(self.net, "statistics"))
        return self.update()

    def forward(self, batch: Batch) -> Any:
        features = self.personal.features(batch.image)
        return SimpleNamespace(features=features, logits=self.personal.classify(features))

    def adjust(self, gradients: Gradients) -> Gradients:
        """The gradient of f(theta) + lambda/2 |theta - w|^2."""
        personal: list[Tensor] = list(self.personal.parameters())
        with torch.no_grad():
            apart = list(torch._foreach_sub(personal, list(self.net.parameters())))
        return added(gradients, personal, apart, self.options.regularisation)

    def step(self, batches: list[Batch], phase: Phase) -> Tensor:
        """Algorithm 1: K steps towards theta, then w - eta lambda (w - theta)."""
        for _ in range(self.options.inner_steps):
            loss = super().step(batches, phase)
        with torch.no_grad():
            share = self.options.eta * self.options.regularisation
            torch._foreach_lerp_(list(self.net.parameters()), list(self.personal.parameters()), share)
        return loss


METHOD = Method(
    server=PFedMeServer,
    client=PFedMeClient,
    paper="T Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020",
    year=2020,
    changes="personalisation (Moreau envelope), local step, server step",
    options=Options,
)
