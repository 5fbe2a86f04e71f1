"""A deputy net travels in place of the personal one, which stays, and both teach each other step by step (PRR's DET).

Chen et al., 2022, Section III-C, Eqs. 5 and 6.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from equipoise.contract.component import Batch, Component, SiteSide
from equipoise.contract.config import Config
from equipoise.contract.protocol import Evaluate, Payload, Work
from equipoise.core.errors import UserError
from equipoise.losses import mutual_kl

RECOVER, EXCHANGE, SUBLIMATE = 1, 2, 3


def next_stage(
    stage: int, deputy_score: float, personal_score: float, recover: float = 0.7, sublimate: float = 0.9
) -> int:
    """DET's step after an epoch with these scores: 1 recover, 2 exchange, 3 sublimate; a round starts from 0.

    A deputy below `recover` times the personal score has to recover. Otherwise recovering leads to exchange, never
    straight on, and exchange to sublimation once the deputy reaches `sublimate` times the personal score.
    """
    if stage not in (0, RECOVER, EXCHANGE, SUBLIMATE):
        raise UserError(f"stage={stage}: DET has the steps 1, 2 and 3, and 0 before a round")
    if stage == 0 or deputy_score < recover * personal_score:
        return RECOVER
    if stage == RECOVER or deputy_score < sublimate * personal_score:
        return EXCHANGE
    return SUBLIMATE


class DeputySite(SiteSide):
    """Trains both nets; who learns from whom changes with DET's step."""

    def carrier(self) -> nn.Module:
        """A second net travels; the client's own stays."""
        self.net = self.client.new_net()
        self.keeps("personal", self.client.net)
        return self.net

    def build(self) -> None:
        self.deputy_learns = self.scratch("deputy_learns", torch.tensor(1.0))
        self.personal_learns = self.scratch("personal_learns", torch.tensor(1.0))
        if self.options.staged:
            square = (self.num_classes, self.num_classes)
            self.stage = self.keeps("stage", torch.tensor(0))
            self.personal_confusion = self.scratch("personal_confusion", torch.zeros(square))
            self.deputy_confusion = self.scratch("deputy_confusion", torch.zeros(square))
        self.trains_apart("deputy", self.net, first="personal")

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        if self.options.staged:
            self.stage.fill_(next_stage(0, 0.0, 0.0))
        yield from ()

    def before_epoch(self) -> None:
        """Set who learns from whom in the present step, and begin to count predictions anew."""
        if not self.options.staged:
            return
        stage = int(self.stage)
        self.note("step", stage)
        self.deputy_learns.fill_(stage != SUBLIMATE)
        self.personal_learns.fill_(stage != RECOVER)
        self.personal_confusion.zero_()
        self.deputy_confusion.zero_()

    def after_epoch(self, last: bool) -> Generator[Work, Any, None]:
        """Compare the two models after an epoch, and decide the next step."""
        options = self.options
        if last or not options.staged:
            return
        personal, deputy = self.personal_confusion, self.deputy_confusion
        if options.metric != "train":
            models = {"personal": partial(self.measured, self.client.net), "deputy": partial(self.measured, self.net)}
            on_valid = options.metric == "valid"
            counts = yield Evaluate("valid", models) if on_valid else Evaluate("train", models, view="augmented")
            personal, deputy = counts["personal"]["confusion"], counts["deputy"]["confusion"]
        score = self.setting.task.agreement
        scores = score(deputy), score(personal)
        self.note("deputy_score", scores[0])
        self.note("personal_score", scores[1])
        stage = next_stage(int(self.stage), *scores, options.recover, options.sublimate)
        self.stage.fill_(stage if options.steps == "ERS" else min(stage, EXCHANGE))

    def measured(self, net: nn.Module, batch: Batch) -> Tensor:
        """Logits (B, C) of one of the nets."""
        return self.client.classified(self.client.workplace.logits(net, batch.image))

    def forward(self, batch: Batch, out: Any) -> None:
        out.deputy_output = self.net(batch.image)

    def loss(self, batch: Batch, out: Any, loss: Tensor) -> Tensor:
        """L_P + L_D (Eqs. 5 and 6); teachers are detached, so each model gets only the gradient from its loss."""
        deputy_logits = self.client.classified(out.deputy_output)
        deputy_loss = self.client.supervised(deputy_logits, batch.label)
        to_deputy = self.deputy_learns * mutual_kl(deputy_logits, out.logits)
        to_personal = self.personal_learns * mutual_kl(out.logits, deputy_logits)
        return loss + to_personal + deputy_loss + to_deputy

    def seen(self, batch: Batch, out: Any) -> None:
        """Add the batch to both models' confusion matrices of this epoch."""
        if not (self.options.staged and self.options.metric == "train"):
            return
        task = self.setting.task
        self.personal_confusion.add_(task.confusion(out.logits, batch.label))
        self.deputy_confusion.add_(task.confusion(self.client.classified(out.deputy_output), batch.label))

    def predicts(self, view: str) -> bool:
        return view == "personal"

    def predict(self, view: str, batch: Batch) -> Tensor:
        return self.measured(self.client.net, batch)


class Deputy(Component):
    """Deputy-enhanced transfer."""

    name: ClassVar[str] = "deputy"
    paper: ClassVar[str] = "Chen et al., PRR-Imbalance, TMI 2022"
    rank: ClassVar[int] = 60
    in_short: ClassVar[tuple[str, ...]] = ("train.epochs=3",)
    counts_epochs: ClassVar[bool] = True
    distinctive: ClassVar[tuple[str, ...]] = ("steps",)
    Site: ClassVar[type[SiteSide]] = DeputySite

    steps: Literal["E", "ER", "ERS"] = Field("ERS", description="steps of the transfer: exchange, recover, sublimate")
    recover: float = Field(
        0.7, ge=0, le=1, description="lambda_1: below this share of the personal score, a deputy recovers"
    )
    sublimate: float = Field(
        0.9, ge=0, le=1, description="lambda_2: above this share of the personal score, it teaches"
    )
    metric: Literal["valid", "train", "released"] = Field(
        "valid",
        description="images whose macro F1 (of masks: Dice) moves the steps; train: augmented, counted while training; "
        "released: augmented, in a pass after each epoch",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Deputy:
        if self.recover > self.sublimate:
            raise ValueError(f"recover = {self.recover} is above sublimate = {self.sublimate}")
        return self

    def holds(self) -> AbstractSet[str]:
        return {"carrier", "predict"}

    def needs(self) -> AbstractSet[str]:
        found = {"model", "plain forward", "supervised", "one loss", "sites"}
        return found | ({"local epochs"} if self.staged else set())

    def lacks(self) -> AbstractSet[str]:
        return {"head predicts"}

    def views(self, views: tuple[str, ...]) -> tuple[str, ...]:
        return ("personal",)

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.steps != "ERS":
            idle = ("sublimate",) if self.staged else ("recover", "sublimate", "metric")
            found |= dict.fromkeys(idle, f"deputy.steps is {self.steps}")
        if setting is not None and self.staged:
            epochs = setting.config.train.epochs
            if epochs == 1:
                found["steps"] = (
                    "with train.epochs = 1 personal models learn nothing from deputies. Set train.epochs to 3 or more"
                )
            elif self.steps == "ERS" and epochs == 2:
                found["sublimate"] = "with train.epochs = 2 a round ends before its third step"
        return found

    def check(self, config: Config) -> None:
        if self.by_epoch and config.train.steps is not None:
            raise UserError("deputy decides after each local epoch what is next: set train.epochs, not train.steps")

    @property
    def staged(self) -> bool:
        """Whether scores decide the steps of the transfer; exchange alone never changes."""
        return self.steps != "E"

    @property
    def by_epoch(self) -> bool:
        return self.staged


COMPONENT = Deputy
