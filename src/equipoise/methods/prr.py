"""PRR-Imbalance: sites share the low frequencies of a deputy model's weights (PFA), the deputy teaches a personal model
step by step (DET), and the loss makes up for the federation's class imbalance (CPA).

Chen et al., Personalized Retrogress-Resilient Federated Learning Toward Imbalanced Medical Data, IEEE TMI 2022.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.aggregation import band_schedule
from equipoise.components._merging import average, total
from equipoise.components._prr_cpa import COUNTS_DISCLOSURE, PROTOTYPE_DISCLOSURE, CPAClient
from equipoise.components._prr_fourier import layer_kinds, merge_deputies
from equipoise.components._prr_options import PRROptions
from equipoise.contract.method import Batch, Method, Setting
from equipoise.contract.protocol import (
    Action,
    Ask,
    Conversation,
    Evaluate,
    Payload,
    PerSite,
    Replies,
    Tensors,
    Train,
    Value,
    Work,
)
from equipoise.core.errors import UserError
from equipoise.losses import membership, mutual_kl
from equipoise.methods.fedbn import FedBNServer
from equipoise.metrics import from_confusion
from equipoise.prototypes import global_prototypes

RECOVER, EXCHANGE, SUBLIMATE = 1, 2, 3
"""DET's steps: the deputy learns from the personal model, both learn from each other, only the personal one learns."""


def next_stage(
    stage: int, deputy_score: float, personal_score: float, recover: float = 0.7, sublimate: float = 0.9
) -> int:
    """DET's step after one with these scores: 1 recover, 2 exchange, 3 sublimate; a round starts from 0.

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


class PRRServer(FedBNServer):
    """Merges deputies, each site's for itself (PFA), and the prototypes of the classes (CPA)."""

    def setup(self) -> None:
        super().setup()
        self.options.check(self.setting.config)
        net = self.setting.new_net()
        self.kinds = layer_kinds(net, self.options.classifier_rows)
        self.state.roster = ""
        self.state.deputies = {}
        self.state.class_counts = torch.zeros(self.setting.num_classes, device=self.setting.device)
        self.state.prototypes = self.state.class_counts.new_zeros(self.setting.num_classes, net.feature_size)
        if self.options.global_view:
            self.state.global_model = dict(net.state_dict())

    def start(self, roster: Sequence[str]) -> Conversation:
        self.state.roster = "\n".join(roster)
        if self.options.cpa_global:
            replies = yield Ask("counts", roster)
            self.state.class_counts = total(replies, "class_counts")

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        last = self.setting.config.train.epochs - 1 if self.options.asks_by_epoch else 0
        deputies: dict[str, Value | PerSite] = {"model": self.deputies(sites)}
        if self.options.forgets_prototypes:
            ones = torch.ones_like(self.state.prototypes)
            self.state.prototypes = self.sample_prototypes(ones[None], self.random("prototypes-start", number))
        for epoch in range(last):
            replies = yield Ask("epoch", sites, epoch=epoch, **deputies, **self.balance())
            self.merge_prototypes(replies, number, epoch)
            deputies = {}  # a site goes on with the deputy that it has
        updates = yield Ask("train", sites, epoch=last, **deputies, **self.balance())
        self.aggregate(updates, number)
        if self.options.sends_last_prototypes:
            self.merge_prototypes(updates, number, last)

    def message(self) -> dict[str, Value | PerSite]:
        """Without DET the net that travels also predicts; with it a site keeps what predicts."""
        message: dict[str, Value | PerSite] = {}
        if not self.options.paired:
            message["model"] = self.deputies(self.state.roster.split("\n"))
        if self.options.global_view:
            message["global_model"] = self.state.global_model
        return message

    def balance(self) -> dict[str, Value | PerSite]:
        """What CPA needs to know of the federation."""
        state, options = self.state, self.options
        counts = {"federation_counts": state.class_counts} if options.cpa_global else {}
        return counts | ({"prototypes": state.prototypes} if options.cpa_local else {})

    def deputies(self, sites: Iterable[str]) -> Tensors | PerSite:
        """The deputies to send: each site's own, and the mean of the others' to a site that never took part."""
        model, own = self.state.model, self.state.deputies
        if not own:
            return model
        return PerSite({site: {e: own.get(f"{site}/{e}", mean) for e, mean in model.items()} for site in sites})

    def aggregate(self, updates: Replies, number: int) -> None:
        """PFA (Eqs. 1 to 4), or the plain mean; sites that took no part keep what they were last sent."""
        config, options = self.setting.config.train, self.options
        if options.global_view:
            whole = average(updates, "model", config.aggregation) | average(updates, "norm", config.aggregation)
            self.state.global_model = whole
        if options.pfa == "off":
            self.state.model = average(updates, "model", config.aggregation)
            return
        band = band_schedule(number - 1, config.rounds, options.band_start, options.band_end)
        mean, merged = merge_deputies(updates, self.kinds, band, options.phase, options.parts)
        self.state.model = mean
        self.state.deputies = self.state.deputies | merged

    def merge_prototypes(self, replies: Replies, number: int, epoch: int) -> None:
        """Global prototypes, sampled around the mean over sites; a class that nobody sent keeps its old one."""
        present = torch.stack(replies.values("prototype_counts")) > 0
        local = torch.stack(replies.values("prototypes"))
        merged = self.sample_prototypes(local, self.random(f"prototypes-{epoch}", number), present)
        self.state.prototypes = torch.where(present.any(0)[:, None], merged, self.state.prototypes)

    def sample_prototypes(self, local: Tensor, generator: torch.Generator, present: Tensor | None = None) -> Tensor:
        """Global prototypes (C, D) around the mean of local ones (K, C, D)."""
        noise = torch.randn(local.shape[1:], generator=generator, device=local.device)
        return global_prototypes(local, noise, self.options.spread, present)


class PRRClient(CPAClient):
    """Trains a personal net, which stays, and a deputy, which travels without batch norm. Without DET both are one."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "counts": COUNTS_DISCLOSURE,
        "train": {
            "model": "the deputy's weights after local training, without batch norm",
            "examples": "number of local training images",
        }
        | PROTOTYPE_DISCLOSURE,
        "epoch": PROTOTYPE_DISCLOSURE,
    }
    views: ClassVar[tuple[str, ...]] = ("personal",)

    def build(self) -> None:
        options = self.options
        self.net = self.setting.new_net()
        self.deputy = self.setting.new_net() if options.paired else self.net
        self.shared = self.entries(self.deputy, "body", "head")
        self.private = self.entries(self.deputy, "norm", "statistics")
        self.receives("model", self.deputy, self.shared)
        self.keeps("norm", self.deputy, self.private)
        if options.paired:
            self.keeps("personal", self.net)
            self.deputy_learns = self.scratch("deputy_learns", torch.tensor(1.0))
            self.personal_learns = self.scratch("personal_learns", torch.tensor(1.0))
        if options.staged:
            square = (self.num_classes, self.num_classes)
            self.stage = self.keeps("stage", torch.tensor(0))
            self.personal_confusion = self.scratch("personal_confusion", torch.zeros(square))
            self.deputy_confusion = self.scratch("deputy_confusion", torch.zeros(square))
        if options.asks_by_epoch:
            self.parked = self.keeps("parked", self.reference(self.setting.new_net()))
        self.build_cpa()
        self.phase("main", {"personal": self.net, "deputy": self.deputy} if options.paired else self.net)

    @classmethod
    def in_vain(cls, setting: Setting) -> tuple[str, ...]:
        options, train, found = setting.options, setting.config.train, []
        if options.staged and train.epochs == 1:
            found.append(
                f'with prr.det = "{options.det}" and train.epochs = 1 personal models learn alone: a round begins and '
                "ends with recovering, so that nothing of the deputies, prr.pfa included, reaches them"
            )
        elif options.det == "ERS" and train.epochs == 2:
            found.append('prr.det = "ERS" never sublimates: with train.epochs = 2 a round ends before its third step')
        if options.cpa_local and options.warmup >= train.rounds:
            found.append(
                f"prr.cpa_local has no effect: none of {train.rounds} rounds is after prr.warmup = {options.warmup}"
            )
        elif options.forgets_prototypes and train.epochs == 1:
            found.append(
                'prr.cpa_local has no effect: with prr.prototype_exchange = "released" and train.epochs = 1 no epoch '
                "has prototypes but ones"
            )
        return tuple(found)

    # ---- actions -----------------------------------------------------------------------------------

    def train(self, message: Payload) -> Action:
        """The local epochs of a round, or the last of them where prototypes travel after each."""
        if self.options.by_epoch:
            yield from self.local_epochs(message, self.config.train.epochs)
        else:
            yield Train()
        return self.update()

    def epoch(self, message: Payload) -> Action:
        """One local epoch, after which only prototypes travel; the deputy waits for the next."""
        yield from self.local_epochs(message, 1)
        self.copy(self.deputy, self.parked, self.shared)
        return self.sent_prototypes()

    def update(self) -> Payload:
        prototypes = self.sent_prototypes() if self.options.sends_last_prototypes else {}
        return {
            "model": self.share(self.deputy, self.shared),
            "examples": int(self.class_counts.sum()),
            **prototypes,
        }

    def local_epochs(self, message: Payload, most: int) -> Generator[Work, Any, None]:
        """Train `most` epochs, or what is left of the round; before each, take the step that DET is at."""
        first = message["epoch"]
        assert isinstance(first, int)
        epochs = self.config.train.epochs
        if first > 0:
            self.copy(self.parked, self.deputy, self.shared)
        else:
            self.begin_round()
        for epoch in range(first, min(first + most, epochs)):
            if self.options.staged:
                self.take_stage()
            if self.options.cpa_local:
                self.align_prototypes()
            yield Train(epochs=1, first_epoch=epoch)
            if self.options.cpa_local:
                self.renew_prototypes()
            if self.options.staged and epoch + 1 < epochs:
                yield from self.choose_stage()

    def begin_round(self) -> None:
        """What a round forgets of the one before: DET's step, and with `released` the prototypes."""
        if self.options.staged:
            self.stage.fill_(next_stage(0, 0.0, 0.0))
        if self.options.forgets_prototypes:
            self.local_prototypes.fill_(1.0)

    def take_stage(self) -> None:
        """Set who learns from whom in the present step, and begin to count predictions anew."""
        stage = int(self.stage)
        self.deputy_learns.fill_(stage != SUBLIMATE)
        self.personal_learns.fill_(stage != RECOVER)
        self.personal_confusion.zero_()
        self.deputy_confusion.zero_()

    def choose_stage(self) -> Generator[Work, Any, None]:
        """Compare the two models after an epoch, and decide the next step."""
        options = self.options
        personal, deputy = self.personal_confusion, self.deputy_confusion
        if options.det_metric != "train":
            models = {"personal": partial(self.logits, self.net), "deputy": partial(self.logits, self.deputy)}
            on_valid = options.det_metric == "valid"
            counts = yield Evaluate("valid", models) if on_valid else Evaluate("train", models, view="augmented")
            personal, deputy = counts["personal"]["confusion"], counts["deputy"]["confusion"]
        stage = next_stage(int(self.stage), macro_f1(deputy), macro_f1(personal), options.recover, options.sublimate)
        self.stage.fill_(stage if options.det == "ERS" else min(stage, EXCHANGE))

    # ---- hooks of the step ---------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Any:
        out = super().forward(batch)
        if self.options.paired:
            out.deputy_logits = self.deputy(batch.image)
        return out

    def loss(self, batch: Batch, out: Any) -> Tensor:
        """L_P + L_D (Eqs. 5 and 6); teachers are detached, so each model gets the gradient of its own loss alone."""
        loss = super().loss(batch, out)
        if not self.options.paired:
            return loss
        if self.options.staged and self.options.det_metric == "train":
            self.count_predictions(batch, out)
        deputy_loss = self.supervised(out.deputy_logits, batch.label)
        to_deputy = self.deputy_learns * mutual_kl(out.deputy_logits, out.logits)
        to_personal = self.personal_learns * mutual_kl(out.logits, out.deputy_logits)
        return loss + to_personal + deputy_loss + to_deputy

    @torch.no_grad()
    def count_predictions(self, batch: Batch, out: Any) -> None:
        """Add the batch to both models' confusion matrices of this epoch."""
        labels = (batch.label, out.logits.argmax(1), out.deputy_logits.argmax(1))
        true, personal, deputy = (membership(some, self.num_classes, self.personal_confusion.dtype) for some in labels)
        self.personal_confusion.addmm_(true.T, personal)
        self.deputy_confusion.addmm_(true.T, deputy)

    # ---- prediction ----------------------------------------------------------------------------------

    def predict(self, view: str, batch: Batch) -> Tensor:
        return self.logits(self.net, batch)


def macro_f1(confusion: Tensor) -> float:
    """Macro F1 over the classes present, from counts (C, C)."""
    return from_confusion(confusion.cpu().numpy())["macro_f1"]


class PRRGlobalClient(PRRClient):
    """Also predicts by the mean of all deputies, batch norm included, as FedIIC used PRR in its Table 1."""

    discloses: ClassVar[dict[str, dict[str, str]]] = PRRClient.discloses | {
        "train": PRRClient.discloses["train"]
        | {"norm": "the deputy's batch-norm weights and statistics after local training (global_view)"}
    }
    views: ClassVar[tuple[str, ...]] = ("global", "personal")

    def build(self) -> None:
        super().build()
        self.mean_deputy = self.reference(self.setting.new_net())
        self.receives("global_model", self.mean_deputy)

    def update(self) -> Payload:
        return super().update() | {"norm": self.share(self.deputy, self.private)}

    def predict(self, view: str, batch: Batch) -> Tensor:
        return self.logits(self.mean_deputy if view == "global" else self.net, batch)


METHOD = Method(
    server=PRRServer,
    client=PRRClient,
    paper="Chen et al., Personalized Retrogress-Resilient Federated Learning Toward Imbalanced Medical Data, TMI 2022",
    year=2022,
    changes="aggregation (Fourier), personalisation (deputy), loss (prototypes)",
    options=PRROptions,
    defaults={"train": {"aggregation": "uniform"}},
    variants={"global_view": PRRGlobalClient},
)
