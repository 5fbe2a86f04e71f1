"""FedBM: a language model's texts about the classes form a frozen classifier. The server trains a generator against the
global model; its images align the sites' feature extractors.

Zhu et al., FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous Federated Learning, Medical
Image Analysis 2025. LKCC is the classifier (Eqs. 2 to 5), CGDE the generator (Eqs. 6 to 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.concepts import Concepts
from equipoise.components.generator import GeneratorComponent, GeneratorOptions
from equipoise.contract.component import Component
from equipoise.contract.method import Method


class Options(GeneratorOptions):
    """FedBM's switches; the defaults are the released settings for OCT at the milder heterogeneity."""

    distinctive: ClassVar[tuple[str, ...]] = ("cgde",)
    #: a fifth of the usual steps five times as often
    in_short: ClassVar[tuple[str, ...]] = ("fedbm.every=1", "fedbm.generator_steps=20")
    at_little_cost: ClassVar[tuple[str, ...]] = (
        "fedbm.generator_steps=2",
        "fedbm.generator_batch=8",
        "fedbm.generator_width=4",
        "fedbm.synthetic=4",
    )

    classifier: Literal["distribution", "averaged", "random", "learned"] = Field(
        "distribution",
        description="frozen: mean and variance of the texts, their mean alone, random directions; "
        "learned: an ordinary head, with the loss that train.loss names",
    )
    temperature: PositiveFloat = Field(12.5, description="tau of Eq. 5; the authors tuned 7.5 to 17.5 per setting")
    cgde: bool = Field(True, description="train a generator, and train sites on its images too")

    @property
    def frozen(self) -> bool:
        """Whether the classifier is frozen (LKCC), so that the net ends in an embedding instead of logits."""
        return self.classifier != "learned"

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        found: dict[str, str] = {}
        if not self.frozen:
            found["temperature"] = 'fedbm.classifier is "learned"'
        if not self.cgde:
            about = [name for name in type(self).model_fields if name.startswith(("lambda_", "generator_"))]
            found |= dict.fromkeys((*about, "condition", "synthetic", "every"), "fedbm.cgde is false")
        if not self.frozen and not self.cgde:
            found |= dict.fromkeys(("encoder", "bank", "concepts", "prompt_share"), "nothing is made of texts")
        rounds = None if setting is None else setting.config.train.rounds
        if self.cgde and rounds is not None and rounds <= self.every:
            found["cgde"] = (
                f"the generator is first trained after round fedbm.every = {self.every}, and there are {rounds} rounds"
            )
        return found

    def holds(self) -> AbstractSet[str]:
        return {"train.loss"} if self.frozen else set()

    def components(self) -> Sequence[Component]:
        texts = {name: getattr(self, name) for name in ("encoder", "bank", "concepts", "prompt_share")}
        found: list[Component] = []
        if self.classifier != "learned":
            found.append(Concepts(classifier=self.classifier, temperature=self.temperature, **texts))
        if self.cgde:
            about = GeneratorComponent.model_fields.keys() - texts.keys()
            found.append(GeneratorComponent(**texts, **{name: getattr(self, name) for name in about}))
        return found


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=(
        "Zhu et al., FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous Federated Learning, "
        "Medical Image Analysis 2025"
    ),
    year=2025,
    changes="frozen classifier made of text, generated images at the sites",
    options=Options,
)
