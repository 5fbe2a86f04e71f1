"""FedRep: each site keeps a personal head. In a round it first fits the head to the received body, then trains the
body under that head; only bodies are averaged.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import ClassVar

from pydantic import Field, PositiveInt

from equipoise.components._personal import PartialClient, PartialNet
from equipoise.components.averaging import FedAvgServer
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method
from equipoise.contract.protocol import Action, Payload, Train
from equipoise.contract.summed import averaged
from equipoise.nets import entries_of


class Options(MethodOptions):
    """FedRep's two kinds of local epochs; while the head is fitted, batch norm is as at evaluation."""

    head_epochs: int = Field(10, ge=0, description="epochs for the head, before the body (the paper's 10)")
    body_epochs: PositiveInt | None = Field(
        None, description="epochs for the body; default: train.epochs (the paper: 1 or 5)"
    )

    def holds(self) -> AbstractSet[str]:
        return {"carrier"}

    def lacks(self) -> AbstractSet[str]:
        return {"whole model", "class head"}


class FedRepNet(PartialNet):
    """The head stays."""

    stays = ("head",)


class FedRepServer(FedRepNet, FedAvgServer):
    """Averages the body, its norm layers included."""


class FedRepClient(FedRepNet, PartialClient):
    """Trains head and body one after the other."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": PartialClient.discloses["train"]
        | {"model": averaged("the body's weights and batch-norm statistics after local training")}
    }

    def build(self) -> None:
        super().build()
        # Statistics are the body's, so they stand still while the head is fitted, to features as evaluation sees them.
        self.phase("head", self.net, entries_of(self.net, "head"), norm="eval")
        self.phase("main", self.net, self.shared)

    def train(self, message: Payload) -> Action:
        yield Train(epochs=self.options.head_epochs, phase="head")
        yield Train(epochs=self.options.body_epochs)
        return self.update()


METHOD = Method(
    server=FedRepServer,
    client=FedRepClient,
    paper="Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021",
    year=2021,
    changes="personalisation (head), separate epochs for head and body",
    options=Options,
)
