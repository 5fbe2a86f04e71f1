"""Classes compete by the federation's counts, and weigh by how far local and global prototypes part (PRR's CPA).

Chen et al., 2022, Section III-D; the formula itself is `conjoint_prototype_aligned`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.components._merging import class_means, total
from equipoise.contract.component import Batch, Component, Message, Options, ServerSide, Sheet, SiteSide
from equipoise.contract.config import Config
from equipoise.contract.disclosed import Entry
from equipoise.contract.protocol import Ask, Conversation, Payload, Replies, Work
from equipoise.contract.summed import added
from equipoise.core.errors import UserError
from equipoise.losses import by_place, conjoint_prototype_aligned
from equipoise.losses.prototype import alignment_weights
from equipoise.prototypes import global_prototypes

PROTOTYPES: dict[str, str] = {
    "prototypes": Entry("mean feature of each class under the trained net"),
    "prototype_counts": Entry("number of training images behind each prototype"),
}


class CPAServer(ServerSide):
    """Adds up class counts once, and draws global prototypes around the mean of the sites'."""

    def setup(self) -> None:
        net = self.server.new_net()
        self.state.class_counts = torch.zeros(self.setting.num_classes, device=self.setting.device)
        self.state.prototypes = self.state.class_counts.new_zeros(self.setting.num_classes, net.feature_size)

    def start(self, roster: Sequence[str]) -> Conversation:
        if self.options.counts == "federation":
            replies = yield self.ask("counts", roster)
            self.state.class_counts = total(replies, "class_counts")

    def survey(self, number: int, sites: Sequence[str]) -> Generator[Ask, Replies, Sequence[str]]:
        if self.options.forgets:
            ones = torch.ones_like(self.state.prototypes)
            self.state.prototypes = self.sample(ones[None], self.random("prototypes-start", number))
        yield from ()
        return sites

    def message(self, number: int) -> Message:
        found: Message = {}
        if self.options.counts == "federation":
            found["federation_counts"] = self.state.class_counts
        if self.options.prototypes:
            found["prototypes"] = self.state.prototypes
        return found

    def exchanged(self, replies: Replies, number: int, epoch: int, last: bool) -> None:
        """Merge prototypes; a class that no site sent keeps its old one."""
        if not self.options.prototypes or (last and self.options.forgets):
            return
        present = torch.stack(replies.values("prototype_counts")) > 0
        local = torch.stack(replies.values("prototypes"))
        self.note("prototype_spread", spread_of(local, present))
        merged = self.sample(local, self.random(f"prototypes-{epoch}", number), present)
        self.state.prototypes = torch.where(present.any(0)[:, None], merged, self.state.prototypes)

    def sample(self, local: Tensor, generator: torch.Generator, present: Tensor | None = None) -> Tensor:
        """Global prototypes (C, D) around the mean of local ones (K, C, D)."""
        noise = torch.randn(local.shape[1:], generator=generator, device=local.device)
        return global_prototypes(local, noise, self.options.spread, present)


def spread_of(local: Tensor, present: Tensor) -> Tensor:
    """Distance of the sites' prototypes (K, C, D) from their mean, by class (C,); 0 if fewer than two sites have the
    class (present (K, C))."""
    among = present[..., None].to(local.dtype)
    number = among.sum(0).clamp(min=1)
    mean = (local * among).sum(0) / number
    return (((local - mean) ** 2 * among).sum(0) / number).sum(1).sqrt()


class CPASite(SiteSide):
    """Trains by the loss of Eq. 13 or one of its halves, and gathers prototypes while it trains."""

    def build(self) -> None:
        shape = (self.num_classes, self.client.net.feature_size)
        if self.options.counts == "federation":
            self.federation_counts = self.receives("federation_counts", torch.ones(self.num_classes))
        if self.options.prototypes:
            self.global_prototypes = self.receives("prototypes", torch.zeros(shape))
            self.local_prototypes = self.keeps("local_prototypes", torch.zeros(shape))
            # What the loss compares. Two equal prototypes, as these are at first, leave their class its weight of 1.
            self.local_side = self.scratch("local_side", torch.ones(shape))
            self.global_side = self.scratch("global_side", torch.ones(shape))
            self.feature_sums = self.scratch("feature_sums", torch.zeros(shape))
            self.feature_counts = self.scratch("feature_counts", torch.zeros(self.num_classes))

    def counts(self, message: Payload) -> Payload:
        """The action that tells the server how many images of each class there are here."""
        return {"class_counts": self.class_counts}

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        if self.options.forgets:
            self.local_prototypes.fill_(1.0)
        yield from ()

    def before_epoch(self) -> None:
        """Compare local and global prototypes, after the warm-up and where both are known."""
        if not self.options.prototypes:
            return
        self.feature_sums.zero_()
        self.feature_counts.zero_()
        if self.client.workplace.round > self.options.warmup:
            known = (self.local_prototypes.any(1) & self.global_prototypes.any(1))[:, None]
            self.local_side.copy_(torch.where(known, self.local_prototypes, 1.0))
            self.global_side.copy_(torch.where(known, self.global_prototypes, 1.0))
        self.note("weight", alignment_weights(self.local_side, self.global_side, self.options.tau))

    def after_epoch(self, last: bool) -> Generator[Work, Any, None]:
        """The mean feature of each class over the epoch's batches (Eq. 10)."""
        if self.options.prototypes:
            self.local_prototypes.copy_(class_means(self.feature_sums, self.feature_counts))
        yield from ()

    def reply(self) -> Generator[Work, Any, Payload]:
        """The last epoch's prototypes, zero for classes that the site lacks, and the images (C,) behind them."""
        yield from ()
        if not self.options.sends(self.client.asked_epoch):
            return {}
        return {"prototypes": self.local_prototypes, "prototype_counts": self.feature_counts}

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The global objective (Eq. 9), the local refinement (Eq. 11) or both."""
        options = self.options
        counts, beta = self.class_counts, 0.0
        if options.counts != "none":
            counts = self.class_counts
            if options.counts == "federation":  # which leave out what sites hold back, but not from themselves
                counts = torch.maximum(self.federation_counts, self.class_counts)
            beta = options.beta
        local, shared = (self.local_side, self.global_side) if options.prototypes else (None, None)
        return conjoint_prototype_aligned(logits, labels, counts, local, shared, beta, options.tau)

    def seen(self, batch: Batch, out: Any) -> None:
        """Add a batch's features (B, D) to the sums of their classes; of maps, the features of all pixels."""
        if self.options.prototypes:
            features, members = by_place(out.features, batch.label, self.num_classes)
            self.feature_sums.addmm_(members.T, features)
            self.feature_counts.add_(members.sum(0))


def warmup_in(rounds: int) -> int:
    """The rounds before prototypes weigh: 15 of 50, as in the paper, and the same share of fewer rounds.

    >>> warmup_in(50), warmup_in(20), warmup_in(100)
    (15, 6, 15)
    """
    return min(15, 3 * rounds // 10)


class Alignment(Options):
    """Numbers of the loss and of its prototypes."""

    beta: float = Field(0.8, ge=0, description="exponent of the ratio of class counts; 0: plain softmax")
    tau: float = Field(
        3.0, ge=1, description="temperature of Eq. 12: smaller values give distances between prototypes more weight"
    )
    warmup: int = Field(
        15, ge=0, description="rounds before prototypes weigh classes; in runs below 50 rounds, 30 % of the rounds"
    )
    spread: Literal["biased", "clamped", "none"] = Field(
        "biased", description="standard deviation of prototypes: the paper's, the released code's (>= 1), or none"
    )

    @classmethod
    def suited(cls, rounds: int) -> Mapping[str, Any]:
        return {"warmup": warmup_in(rounds)}


class CPA(Alignment, Component):
    """Conjoint prototype-aligned loss (Eqs. 9 to 13)."""

    name: ClassVar[str] = "cpa"
    paper: ClassVar[str] = "Chen et al., PRR-Imbalance, TMI 2022"
    rank: ClassVar[int] = 21
    limit: ClassVar[Mapping[str, Any]] = {"counts": "none", "prototypes": False}
    in_short: ClassVar[tuple[str, ...]] = ("cpa.warmup=0",)
    counts_epochs: ClassVar[bool] = True
    distinctive: ClassVar[tuple[str, ...]] = ("prototypes",)
    Site: ClassVar[type[SiteSide]] = CPASite
    Server: ClassVar[type[ServerSide]] = CPAServer

    counts: Literal["federation", "site", "none"] = Field(
        "federation", description="class counts that rebalance the logits (Eq. 9); none: no rebalancing"
    )
    prototypes: bool = Field(True, description="weigh classes by the distance of local and global prototypes (Eq. 11)")
    exchange: Literal["round", "epoch", "released"] = Field(
        "round",
        description="when sites exchange prototypes; epoch: after each local epoch; released: likewise, but each "
        "round begins with prototypes of ones",
    )

    def holds(self) -> AbstractSet[str]:
        return {"loss"} if self.acts else set()

    def needs(self) -> AbstractSet[str]:
        found = {"supervised"} if self.acts else set()
        return found | ({"one loss", "local epochs", "plain features"} if self.prototypes else set())

    def lacks(self) -> AbstractSet[str]:
        return {"one training ask"} if self.asks_by_epoch else set()

    def single_replies(self) -> str:
        return "the spread of prototypes over sites is taken from each site's own" if self.prototypes else ""

    def discloses(self) -> Sheet:
        sheet: Sheet = {}
        if self.counts == "federation":
            sheet["counts"] = {"class_counts": added(Entry("number of local training images of each class", "counts"))}
        if self.prototypes and not self.forgets:
            sheet["train"] = PROTOTYPES
        if self.asks_by_epoch:
            sheet["epoch"] = PROTOTYPES
        return sheet

    def sends(self, epoch: bool) -> bool:
        """Whether a site's reply carries prototypes, after an `epoch` in the middle of a round or after its last."""
        return self.prototypes and (epoch or not self.forgets)

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.counts == "none":
            found["beta"] = "cpa.counts is none"
        if not self.prototypes:
            found |= dict.fromkeys(("tau", "warmup", "spread", "exchange"), "cpa.prototypes is false")
        elif setting is not None and self.warmup >= setting.config.train.rounds:
            rounds = setting.config.train.rounds
            found["prototypes"] = f"none of the {rounds} rounds comes after cpa.warmup = {self.warmup}"
        elif setting is not None and self.forgets and setting.config.train.epochs == 1:
            found["prototypes"] = "with cpa.exchange = released and train.epochs = 1, prototypes are always ones"
        return found

    def check(self, config: Config) -> None:
        if self.acts and config.train.loss != "ce":
            raise UserError(
                f"train.loss = {config.train.loss!r}, but cpa is the loss; leave one of them out (in prr, "
                "prr.cpa_global = false and prr.cpa_local = false leave cpa out)"
            )
        if self.by_epoch and config.train.steps is not None:
            raise UserError(f"{self.name} acts after each local epoch: set train.epochs, not train.steps")

    @property
    def acts(self) -> bool:
        """Whether either half of the loss is on."""
        return self.counts != "none" or self.prototypes

    @property
    def by_epoch(self) -> bool:
        return self.prototypes

    @property
    def asks_by_epoch(self) -> bool:
        return self.prototypes and self.exchange != "round"

    @property
    def forgets(self) -> bool:
        """Whether a round begins without the prototypes of the one before."""
        return self.prototypes and self.exchange == "released"


COMPONENT = CPA
