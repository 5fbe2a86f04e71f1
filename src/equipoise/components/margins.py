"""Margins by class frequency and difficulty, added to logits: FedIIC's difficulty-aware logit adjustment (Eq. 6).

Before each round the sites tell how hard each class is for the received model.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.components._merging import total
from equipoise.contract.component import Batch, Component, Message, ServerSide, Sheet, SiteSide
from equipoise.contract.disclosed import Entry
from equipoise.contract.protocol import Action, Ask, Payload, Replies, Scan, Tensors, Work
from equipoise.contract.summed import added
from equipoise.losses import class_loss_sums, difficulty_margins, logit_adjusted


class MarginsServer(ServerSide):
    """Asks before each round how hard each class is."""

    def survey(self, number: int, sites: Sequence[str]) -> Generator[Ask, Replies, Sequence[str]]:
        if self.options.difficulty == "none":
            return sites
        found = yield self.ask("survey", sites, **self.server.received(sites))
        losses, counts = total(found, "class_loss"), total(found, "class_count")
        difficulty = losses / (1e-5 + counts)
        if self.setting.config.privacy.limit > 1:  # a class that no site may tell of is as hard as all are together
            difficulty = torch.where(counts > 0, difficulty, losses.sum() / counts.sum().clamp(min=1))
        self.state.difficulty = difficulty
        self.note("difficulty", difficulty)
        return found.sites  # the classes of a site that did not answer would pass for the easiest

    def message(self, number: int) -> Message:
        if self.options.difficulty == "none":
            return {}
        equal = torch.ones(self.setting.num_classes, device=self.setting.device)  # before the first survey
        return {"difficulty": self.state.difficulty if "difficulty" in self.state else equal}


class MarginsSite(SiteSide):
    """Trains by the cross entropy of logits with margins."""

    def build(self) -> None:
        self.margins = self.scratch("margins", torch.zeros(self.num_classes))
        if self.options.difficulty == "none":
            self.difficulty = self.scratch("difficulty", torch.ones(self.num_classes))
        else:
            self.difficulty = self.receives("difficulty", torch.zeros(self.num_classes))

    def survey(self, message: Payload) -> Action:
        """How hard each class is for the received model, before training."""
        return (yield Scan("train", self.class_losses, view=self.options.difficulty_view))

    def class_losses(self, batch: Batch) -> Tensors:
        """Summed loss and number of samples of each class in a batch, (C,) each."""
        losses, counts = class_loss_sums(self.client.outputs(batch).logits, batch.label)
        return {"class_loss": losses, "class_count": counts}

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        self.margins.copy_(difficulty_margins(self.class_counts, self.difficulty, self.options.exponent))
        self.note("margin", torch.where(self.class_counts > 0, self.margins, 0.0))
        yield from ()

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logit_adjusted(logits, labels, self.margins)


class Margins(Component):
    """Difficulty-aware logit adjustment."""

    name: ClassVar[str] = "margins"
    paper: ClassVar[str] = "Wu et al., FedIIC, MICCAI 2023"
    rank: ClassVar[int] = 20
    Site: ClassVar[type[SiteSide]] = MarginsSite
    Server: ClassVar[type[ServerSide]] = MarginsServer

    exponent: float = Field(0.25, ge=0, description="d of the difficulty in the margins; 0: class frequency alone")
    difficulty: Literal["federation", "none"] = Field(
        "federation",
        description="whose class losses count; none: all classes are equally hard, and sites measure nothing",
    )
    difficulty_view: Literal["plain", "augmented", "cached"] = Field(
        "plain",
        description="images that difficulty is measured on: as in evaluation, a training view drawn anew each round, "
        "or one drawn once for all rounds (released)",
    )

    def holds(self) -> AbstractSet[str]:
        return {"loss"}

    def needs(self) -> AbstractSet[str]:
        return {"supervised"} if self.difficulty == "none" else {"supervised", "model"}

    def lacks(self) -> AbstractSet[str]:
        return {"absent classes", "all classes"}  # the margins leave such a class out of the softmax

    def discloses(self) -> Sheet:
        if self.difficulty == "none":
            return {}
        return {
            "survey": {
                "class_loss": added(Entry("the received model's loss on the local training images, summed by class")),
                "class_count": added(Entry("number of local training images of each class", "counts")),
            }
        }

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        if self.difficulty == "none":
            return dict.fromkeys(("exponent", "difficulty_view"), "margins.difficulty is none")
        return {}


COMPONENT = Margins
