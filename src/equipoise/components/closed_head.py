"""Replaces the head by a classifier in closed form on the trained body, from sums that sites send at a round's end.

Where bodies are personal, their features cannot be compared. Then each site solves for a head from its sums alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.closed_form import Head, principal, whitened
from equipoise.components._closed_form import (
    ENTRIES,
    MOMENT_ENTRIES,
    SUM_ENTRIES,
    ClosedFormOptions,
    as_sums,
    gridded,
    moments_by,
    sums_by,
    total_of,
    unpacked,
    wide,
)
from equipoise.contract.component import Batch, Component, Message, ServerSide, Sheet, SiteSide
from equipoise.contract.protocol import Action, Conversation, Payload, Scan, Tensors

#: the tensors of a fitted head
PARTS = ("mean", "whitening", "weights", "offsets", "known")


def no_head(features: int, components: int, classes: int) -> Tensors:
    """The tensors of a head that is not there yet: no class is known."""
    double = torch.float64
    return {
        "mean": torch.zeros(features, dtype=double),
        "whitening": torch.zeros(features, components, dtype=double),
        "weights": torch.zeros(components, classes, dtype=double),
        "offsets": torch.zeros(classes, dtype=double),
        "known": torch.zeros(classes, dtype=torch.bool),
    }


def widened(head: Head, most: int) -> Tensors:
    """A head's tensors, with rows of zeros for components that are not used."""
    rest = most - head.weights.shape[0]
    weights = torch.nn.functional.pad(head.weights, (0, 0, 0, rest))
    return {"weights": weights, "offsets": head.offsets, "known": head.known}


class ClosedHeadServer(ServerSide):
    """Asks for sums over the features of the model that a round leaves, and solves for its head."""

    def setup(self) -> None:
        if self.options.common:
            size = self.server.new_net().feature_size
            self.most = min(self.options.dimensions, size)
            for name, value in no_head(size, self.most, self.setting.num_classes).items():
                setattr(self.state, name, value.to(self.setting.device))

    def finish(self, number: int, sites: Sequence[str]) -> Conversation:
        if self.options.when == "end" and number != self.setting.config.train.rounds:
            return
        if not self.options.common:
            yield self.ask("fit", sites, **self.server.received(sites))
            return
        found = self.values((yield self.ask("moments", sites, **self.server.received(sites))), "gram")
        images = float(total_of(found, "number"))
        most = self.options.most_components(images, len(found), len(self.state.mean))
        mean, whitening = principal(unpacked(total_of(found, "gram")), total_of(found, "sums"), images, most)
        self.state.mean, self.state.whitening = mean, wide(whitening, self.most)
        found = self.values((yield self.ask("sums", found.sites, **self.server.received(sites))), "gram")
        sums = as_sums({name: total_of(found, name) for name in ENTRIES}).first(max(whitening.shape[1], 1))
        for name, value in widened(self.options.head(sums), self.most).items():
            setattr(self.state, name, value)

    def predicting(self) -> Message:
        return {name: getattr(self.state, name) for name in PARTS} if self.options.common else {}


class ClosedHeadSite(SiteSide):
    """Takes sums over the features of its net, and predicts by the head that follows from them."""

    def build(self) -> None:
        size = self.client.net.feature_size
        self.most = min(self.options.dimensions, size)
        declare = self.receives if self.options.common else self.keeps
        self.head = {name: declare(name, t) for name, t in no_head(size, self.most, self.num_classes).items()}

    def raw_features(self, batch: Batch) -> Tensor:
        """Pooled features (B, D) of the site's net."""
        found: Tensor = self.client.outputs(batch).features
        return found.float()

    def features(self, batch: Batch) -> Tensor:
        """Whitened features (B, K) of unit length."""
        return whitened(self.raw_features(batch), self.head["mean"], self.head["whitening"])

    def taken(self) -> Tensor:
        """The classes (C,) whose images may be in a sum that leaves the site."""
        return self.class_counts >= max(self.setting.config.privacy.least, 1)

    # ---- a common body -------------------------------------------------------------------------------------------

    def moments(self, message: Payload) -> Action:
        """Sums over raw features, from which the server makes the whitening."""
        return {**gridded((yield Scan("train", moments_by(self.raw_features, self.taken()))))}

    def sums(self, message: Payload) -> Action:
        """Sums of whitened features of unit length."""
        found = yield Scan("train", sums_by(self.features, self.taken(), self.num_classes))
        return {**gridded({name: found[f"told {name}"] for name in ENTRIES})}

    # ---- a personal body -----------------------------------------------------------------------------------------

    def fit(self, message: Payload) -> Action:
        """The head of own sums; nothing leaves the site."""
        everything = torch.ones_like(self.class_counts, dtype=torch.bool)
        raw = yield Scan("train", moments_by(self.raw_features, everything))
        images = float(raw["number"])
        most = self.options.most_components(images, 1, len(self.head["mean"]))
        mean, whitening = principal(unpacked(raw["gram"]), raw["sums"], images, most)
        self.head["mean"].copy_(mean)
        self.head["whitening"].copy_(wide(whitening, self.most))
        found = yield Scan("train", sums_by(self.features, everything, self.num_classes))
        own = as_sums({name: found[f"own {name}"] for name in ENTRIES}).first(max(whitening.shape[1], 1))
        for name, value in widened(self.options.head(own), self.most).items():
            self.head[name].copy_(value)
        return {}

    def predicts(self, view: str) -> bool:
        return self.options.common or view == "personal"

    def predict(self, view: str, batch: Batch) -> Tensor:
        """By the closed form; by the net's own head as long as there is none."""
        out = self.client.outputs(batch)
        head = Head(*(self.head[name] for name in PARTS[2:]))
        features = whitened(out.features.float(), self.head["mean"], self.head["whitening"])
        return torch.where(head.known.any(), head.scores(features).float(), out.logits)


class ClosedHead(Component, ClosedFormOptions):
    """The closed form on the body that training leaves."""

    name: ClassVar[str] = "closed-head"
    paper: ClassVar[str] = "no paper: linear discriminant analysis from sums over sites"
    rank: ClassVar[int] = 95
    Site: ClassVar[type[SiteSide]] = ClosedHeadSite
    Server: ClassVar[type[ServerSide]] = ClosedHeadServer

    when: Literal["round", "end"] = Field("round", description="after each round, or after the last one alone")
    sums: Literal["auto", "common", "own"] = Field(
        "auto",
        description="common: sums over sites, which needs one body for all; own: each site's; auto: as the body is",
    )

    @property
    def common(self) -> bool:
        """Whether sums are added over sites."""
        return self.sums != "own"

    def fitted(self, lacks: AbstractSet[str], others: Sequence[Component]) -> Component:
        """Where bodies are personal, `auto` means own sums."""
        if self.sums != "auto":
            return self
        lacks = frozenset(lacks).union(*(other.lacks() for other in others))
        stays = {group for other in others for group in other.stays}
        carried = any("carrier" in other.holds() for other in others)
        personal = carried or lacks & {"model", "one model", "net trains"} or stays & {"body", "norm", "statistics"}
        return self.model_copy(update={"sums": "own" if personal else "common"})

    def holds(self) -> AbstractSet[str]:
        return {"predict"} if self.common else set()

    def lacks(self) -> AbstractSet[str]:
        return {"head predicts"} if self.common else set()

    def needs(self) -> AbstractSet[str]:
        always = {"plain forward", "plain features", "pooled features", "sites", "fixed personal models"}
        return always | ({"model", "one model", "net trains"} if self.sums == "common" else set())

    def discloses(self) -> Sheet:
        return {"moments": {**MOMENT_ENTRIES}, "sums": {**SUM_ENTRIES}} if self.common else {"fit": {}}

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return ClosedFormOptions.without_effect(self, setting)


COMPONENT = ClosedHead
