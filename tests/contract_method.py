"""A method that uses every part of the contract once: its runs test the engine, not a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.components._merging import average, total
from equipoise.contract.client import Gradients
from equipoise.contract.method import Batch, Client, Method, PerBatch, Phase, Server
from equipoise.contract.modules import copy_entries, share
from equipoise.contract.protocol import (
    Action,
    Ask,
    Conversation,
    Evaluate,
    Payload,
    PerSite,
    Scan,
    Train,
)
from equipoise.nets import entries_of


class ContractServer(Server):
    """Two exchanges a round, a value per site, a start that gathers counts, plain values in the state."""

    def setup(self) -> None:
        net = self.setting.new_net()
        self.state.model = {n: t for n, t in net.state_dict().items() if not n.startswith("head")}
        self.state.rounds = 0
        self.state.label = "contract"

    def start(self, roster: Sequence[str]) -> Conversation:
        replies = yield Ask("count", roster, offset=1.5, note="hello", flag=True)
        self.state.counts = total(replies, "counts")

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        surveys = yield Ask("survey", sites, model=self.state.model)
        difficulty = total(surveys, "loss") / total(surveys, "count").clamp(min=1)
        own = PerSite({site: torch.full((2,), float(index)) for index, site in enumerate(sites)})
        updates = yield Ask("train", sites, model=self.state.model, difficulty=difficulty, own=own)
        self.state.model = average(updates)
        self.state.noise = torch.rand(2, generator=self.server_noise(number))
        self.state.rounds = number

    def server_noise(self, number: int) -> torch.Generator:
        return self.random("noise", number)

    def message(self) -> dict[str, Any]:
        return {"model": self.state.model}


class ContractClient(Client):
    """Personal head, control of gradients, two phases, a frozen reference, extra fields in batches."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "count": {"counts": "images per class"},
        "survey": {"loss": "summed loss per class", "count": "images per class"},
        "train": {
            "model": "body",
            "examples": "number of images",
            "seen": "sum of what it was sent",
            "stage": "a word",
        },
    }
    views = ("global", "personal")

    def build(self) -> None:
        self.workplace.image_views = self.workplace.batches_per_step = 2
        self.net = self.setting.new_net()
        self.frozen = self.reference(self.setting.new_net())
        self.body = tuple(n for n in self.net.state_dict() if not n.startswith("head"))
        self.receives("model", self.net, self.body)
        self.keeps("head", self.net, entries_of(self.net, "head"))
        self.scratch("frozen", self.frozen)
        self.difficulty = self.receives("difficulty", torch.zeros(self.num_classes))
        self.own = self.receives("own", torch.zeros(2))
        self.visits = self.keeps("visits", torch.zeros(()))
        self.steps_taken = self.scratch("steps_taken", torch.zeros(()))
        self.gate = self.scratch("gate", torch.ones(()))
        self.phase("main", self.net)
        self.phase("head", self.net, entries_of(self.net, "head"), norm="eval")

    def count(self, message: Payload) -> Payload:
        assert message["note"] == "hello" and message["flag"] is True and message["offset"] == 1.5
        return {"counts": self.class_counts.clone()}

    def survey(self, message: Payload) -> Action:
        sums = yield Scan("train", self.class_sums)
        return {"loss": sums["loss"], "count": sums["count"]}

    def class_sums(self, batch: Batch) -> dict[str, Tensor]:
        member = (batch.label[:, None] == torch.arange(self.num_classes)).float()
        loss = nn.functional.cross_entropy(self.net(batch.image), batch.label, reduction="none")
        return {"loss": loss @ member, "count": member.sum(0)}

    def train(self, message: Payload) -> Action:
        copy_entries(self.net, self.frozen)
        self.visits += 1
        features = yield Scan("train", lambda b: {"features": self.net.features(b.image)}, reduce="concatenate")
        assert len(features["features"]) == self.class_counts.sum()
        yield Train(steps=1, phase="head")
        before = yield Evaluate("valid", {"personal": lambda b: self.predict("personal", b)})
        self.gate.fill_(0.5 if before["personal"]["confusion"].sum() > 0 else 0.25)
        yield Train()
        self.leaked = "this must not survive the ask"
        return {
            "model": share(self.net, self.body),
            "examples": int(self.class_counts.sum()),
            "seen": float(self.own.sum() + self.steps_taken * 0),
            "stage": "done",
        }

    def step(self, batches: list[Batch], phase: Phase) -> Tensor:
        losses = [self.loss(batch, self.outputs(batch)) for batch in batches]
        loss = torch.stack(losses).mean()
        gradients = torch.autograd.grad(loss, phase.optimiser.parameters, allow_unused=True)
        self.workplace.descend(phase, gradients)
        self.steps_taken += 1
        return loss.detach()

    def forward(self, batch: Batch) -> Any:
        both = torch.cat([batch.image, batch.second]) if hasattr(batch, "second") else batch.image
        features = self.net.features(both)
        return SimpleNamespace(logits=self.net.classify(features)[: len(batch.label)], features=features)

    def loss(self, batch: Batch, out: Any) -> Tensor:
        assert batch.constant.shape == (3,)
        teacher = nn.functional.mse_loss(out.logits, batch.teacher)
        return self.supervised(out.logits + 0 * self.difficulty, batch.label) + self.gate * teacher

    def adjust(self, gradients: Gradients) -> Gradients:
        return {parameter: gradient * 1.0 for parameter, gradient in gradients.items()}

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        return {"teacher": self.frozen(chunk.image), "constant": PerBatch(torch.zeros(chunk.batches, 3))}

    def predict(self, view: str, batch: Batch) -> Tensor:
        return self.net(batch.image)

    def adapt(self) -> Any:
        copy_entries(self.net, self.frozen)
        self.difficulty.zero_()
        yield Train(steps=1, phase="head")


METHOD = Method(ContractServer, ContractClient, "none: the contract's own test", 2026, "everything")
