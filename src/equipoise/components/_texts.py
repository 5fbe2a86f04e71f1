"""Concept texts in a run: which embeddings it uses, and the frozen classifier made of them (FedBM's LKCC)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from equipoise.contract.component import Component, Options
from equipoise.contract.setting import Setting
from equipoise.core.streams import stream
from equipoise.nets.concepts import DEFAULT_ENCODER, find_bank, load_bank
from equipoise.nets.concepts.distributions import ConceptClassifier
from equipoise.prototypes import concept_statistics


class TextOptions(Options):
    """Which texts about the classes are used."""

    encoder: str = Field(DEFAULT_ENCODER, description="text encoder of the concept bank to look for")
    bank: str = Field("", description="file of a concept bank, instead of looking for one")
    concepts: Literal["correct", "released"] = Field(
        "correct", description="released: OCT with two concepts swapped, as in the authors' code"
    )
    prompt_share: float = Field(1.0, gt=0, le=1, description="share of the prompts that is used, drawn from the seed")


class Texts(TextOptions, Component):
    """A component that is made of texts about the classes."""

    def embeddings(self, setting: Setting) -> Tensor:
        """Embeddings (C, M, D) of the prompts that this run uses, from a concept bank."""
        data, classes = setting.config.data, setting.task.classes
        bank = load_bank(Path(self.bank)).select(classes) if self.bank else find_bank(data, classes, self.encoder)
        embeddings = (bank.as_released() if self.concepts == "released" else bank).embeddings
        available = embeddings.shape[1]
        wanted = max(round(self.prompt_share * available), 1)
        draw = torch.Generator().manual_seed(stream(setting.config.seed, "prompts"))
        chosen = torch.randperm(available, generator=draw)[:wanted].sort().values
        return embeddings[:, chosen].to(setting.device)


def concept_classifier(setting: Setting, embeddings: Tensor, kind: str, temperature: float) -> ConceptClassifier:
    """The frozen classifier of a kind; a random one has unit directions in place of the texts."""
    mean, variance = concept_statistics(embeddings)
    if kind == "random":
        mean = setting.seeded("classifier", lambda: F.normalize(torch.randn(mean.shape), dim=-1))
    if kind != "distribution":
        variance = torch.zeros_like(variance)
    return ConceptClassifier(mean, variance, temperature)
