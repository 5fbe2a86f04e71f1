"""FedBABU: sites train and average the body alone, under a head that keeps its initial weights. Each site fine-tunes a
personal model before evaluation.

Oh, Kim and Yun, FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from equipoise.components._merging import average
from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method
from equipoise.contract.modules import share
from equipoise.contract.protocol import Ask, Conversation, Payload, Train, Work
from equipoise.contract.summed import averaged
from equipoise.nets import all_but, entries_of


class Options(MethodOptions):
    """What trains in the rounds, and how a site fine-tunes."""

    trained: Literal["body", "all"] = Field(
        "body", description="what sites train; all: FedAvg with fine-tuning, which the paper compares with"
    )
    finetune_epochs: int = Field(5, ge=0, description="local epochs before a personal model is measured")
    finetuned: Literal["all", "head", "body"] = Field("all", description="what fine-tuning changes")
    finetune_lr: PositiveFloat | None = Field(
        None, description="its learning rate, the same in every round; by default that of the round"
    )

    def holds(self) -> AbstractSet[str]:
        return {"merge", "carrier"}

    def lacks(self) -> AbstractSet[str]:
        return {"whole model", "class head", "fixed personal models"}


class FedBABUServer(FedAvgServer):
    """Sends the whole net and averages what sites trained of it."""

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        updates = yield Ask("train", sites, model=self.state.model)
        self.state.model = self.state.model | average(updates, "model", self.setting.config.train.aggregation)


class FedBABUClient(FedAvgClient):
    """Trains the body; the head moves only in fine-tuning, of which nothing is kept."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": FedAvgClient.discloses["train"]
        | {
            "model": averaged(
                "the body's weights and batch-norm statistics after local training; the head's too if it trains"
            )
        }
    }
    views = ("global", "personal")

    def build(self) -> None:
        super().build()
        options, optimiser = self.options, self.setting.config.train.optimiser
        everything, body, head = self.shared, all_but(self.net, "head"), entries_of(self.net, "head")
        self.trained = {"body": body, "all": everything}[options.trained]
        self.phase("main", self.net, self.trained)
        self.phase(
            "finetune",
            self.net,
            {"all": everything, "head": head, "body": body}[options.finetuned],
            optimiser.model_copy(update={"lr": options.finetune_lr or optimiser.lr, "keep": False}),
            norm="eval" if options.finetuned == "head" else "train",
            scheduled=options.finetune_lr is None,
        )

    def update(self) -> Payload:
        return super().update() | {"model": share(self.net, self.trained)}

    def adapt(self) -> Generator[Work, Any, None]:
        yield Train(epochs=self.options.finetune_epochs, phase="finetune")


METHOD = Method(
    server=FedBABUServer,
    client=FedBABUClient,
    paper="Oh et al., FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022",
    year=2022,
    changes="personalisation (frozen head, fine-tuning)",
    options=Options,
)
