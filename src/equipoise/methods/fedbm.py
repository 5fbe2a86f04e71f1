"""FedBM: a frozen classifier made of what a language model knows about the classes, and a generator, trained on the
server against the global model, whose images hold the sites' feature extractors together.

Zhu et al., FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous Federated Learning, Medical
Image Analysis 2025. LKCC is the classifier (Eqs. 2 to 5), CGDE the generator (Eqs. 6 to 10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.components._fedbm_parts import Parts
from equipoise.components._generator_training import GeneratorTraining, jittered
from equipoise.components._merging import average
from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.config import Table
from equipoise.contract.method import Batch, Method, PerBatch, Setting
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, PerSite, Tensors, Value
from equipoise.nets.concepts import DEFAULT_ENCODER
from equipoise.nets.rounding import rounded_up

GENERATED_AT_ONCE = 256  # images, to bound the memory of the generator's feature maps


class Options(Table):
    """FedBM's switches; the defaults are the released settings for OCT at the milder heterogeneity."""

    classifier: Literal["distribution", "averaged", "random", "learned"] = Field(
        "distribution",
        description="frozen: mean and variance of the texts, their mean alone, random directions; "
        "learned: an ordinary head, with the loss that train.loss names",
    )
    temperature: PositiveFloat = Field(12.5, description="tau of Eq. 5; the authors tuned 7.5 to 17.5 per setting")
    encoder: str = Field(DEFAULT_ENCODER, description="text encoder of the concept bank to look for")
    bank: str = Field("", description="file of a concept bank, instead of looking for one")
    concepts: Literal["correct", "released"] = Field(
        "correct", description="released: OCT with two concepts swapped, as in the authors' code"
    )
    prompt_share: float = Field(1.0, gt=0, le=1, description="share of the prompts that is used, drawn from the seed")
    cgde: bool = Field(True, description="train a generator, and train sites on its images too")
    condition: Literal["text", "gaussian"] = Field("text", description="what images are made from: concepts or noise")
    lambda_div: float = Field(1.0, ge=0, description="weight of the generator's diversity term (Eq. 7)")
    lambda_dis: float = Field(0.1, ge=0, description="weight of the generator's batch-norm term (Eq. 8)")
    synthetic: PositiveInt = Field(16, description="generated images beside each local batch")
    every: PositiveInt = Field(5, description="rounds between two trainings of the generator")
    generator_steps: PositiveInt = Field(100, description="steps of one training of the generator")
    generator_batch: int = Field(64, ge=2, description="images of each of these steps")
    generator_lr: PositiveFloat = Field(3e-4, description="their learning rate (Adam, betas 0.5 and 0.999)")
    generator_width: PositiveInt = Field(64, description="channels of the generator's last layers")

    @property
    def frozen(self) -> bool:
        """Whether the classifier is frozen (LKCC), so that the net ends in an embedding instead of logits."""
        return self.classifier != "learned"

    def unused(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if not self.frozen:
            found["temperature"] = 'fedbm.classifier is "learned"'
        if not self.cgde:
            about = [name for name in type(self).model_fields if name.startswith(("lambda_", "generator_"))]
            found |= dict.fromkeys((*about, "condition", "synthetic", "every"), "fedbm.cgde is false")
        if not self.frozen and not self.cgde:
            found |= dict.fromkeys(("encoder", "bank", "concepts", "prompt_share"), "nothing is made of texts")
        return found


# ---- the server --------------------------------------------------------------------------------------------


class FedBMServer(FedAvgServer):
    """Makes the classifier once, averages the nets, and every few rounds trains the generator against the average."""

    def setup(self) -> None:
        self.parts = Parts(self.setting)
        self.state.model = _copied(self.parts.net)  # whose own tensors hold the teacher later
        if self.options.frozen:
            self.state.classifier = _copied(self.parts.classifier)
        if self.options.cgde:
            self.state.codes, self.state.generator = _copied(self.parts.codes), _copied(self.parts.generator)
            self.generator_training = GeneratorTraining(self.parts, self.setting)

    def message(self) -> dict[str, Value | PerSite]:
        frozen: dict[str, Value | PerSite] = {"classifier": self.state.classifier} if self.options.frozen else {}
        return {**super().message(), **frozen}

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        options, message = self.options, self.message()
        if options.cgde and number > options.every:
            message |= {"codes": self.state.codes, "generator": self.state.generator}
        updates = yield Ask("train", sites, **message)
        self.state.model = average(updates, "model", self.setting.config.train.aggregation)
        if options.cgde and number % options.every == 0 and number < self.setting.config.train.rounds:
            self.state.generator = self.train_generator(self.random("generator", number))

    def train_generator(self, random: torch.Generator) -> Tensors:
        """The generator after some steps on Eq. 10 against the global model, the teacher, which stands still."""
        for name in ("classifier", "codes", "generator"):
            if name in self.state:
                getattr(self.parts, name).load_state_dict(getattr(self.state, name))
        self.parts.net.load_state_dict(self.state.model)
        self.generator_training.run(random)
        return _copied(self.parts.generator)


def _copied(module: nn.Module) -> Tensors:
    return {name: value.clone() for name, value in module.state_dict().items()}


# ---- a site ------------------------------------------------------------------------------------------------


class FedBMClient(FedAvgClient):
    """Trains the net under the frozen classifier, on its own images and on those that the generator makes."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": {
            **FedAvgClient.discloses["train"],
            "model": "the net's weights, with its linear layer onto text embeddings, and batch-norm statistics",
        }
    }
    #: what draws labels and codes of generated images, in an ask that brings a generator
    synthesis: torch.Generator | None = None

    @classmethod
    def ignores(cls, setting: Setting) -> tuple[str, ...]:
        return ("train.loss",) if setting.options.frozen else ()

    @classmethod
    def in_vain(cls, setting: Setting) -> tuple[str, ...]:
        options, rounds = setting.options, setting.config.train.rounds
        if not options.cgde or rounds > options.every:
            return ()
        return (
            f"fedbm.cgde has no effect: the generator is first trained after round fedbm.every = {options.every}, "
            f"and there are {rounds} rounds",
        )

    def build(self) -> None:
        parts = Parts(self.setting)
        self.net, self.show = parts.net, parts.show
        self.shared = tuple(self.shared_entries(self.net))
        self.receives("model", self.net, self.shared)
        self.phase("main", self.net)
        if self.options.frozen:
            self.classifier = self.receives("classifier", self.reference(parts.classifier))
        if self.options.cgde:
            self.codes = self.receives("codes", self.reference(parts.codes))
            self.generator = self.receives("generator", self.reference(parts.generator))

    def train(self, message: Payload) -> Action:
        if "generator" in message:
            self.synthesis = self.random("synthesis")
        return (yield from super().train(message))

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        """Generated images (batches, synthetic, C, H, W) and their labels, uniform over classes, for every batch.

        As in the generator's training, and as released, each batch is shifted and flipped.
        """
        if self.synthesis is None:
            return {}
        shape = (chunk.batches, self.options.synthetic)
        labels = torch.randint(self.num_classes, shape, generator=self.synthesis, device=self.setting.device)
        codes = self.codes.draw(labels.flatten(), self.synthesis)
        with self.precision():
            images = torch.cat([self.generated(some) for some in codes.split(GENERATED_AT_ONCE)]).float()
        shown = self.show(jittered(images.unflatten(0, shape), self.synthesis)).flatten(0, 1)
        if self.config.compute.channels_last:  # as local images lie, which they stand beside
            shown = shown.contiguous(memory_format=torch.channels_last)
        return {"synthetic": PerBatch(shown.unflatten(0, shape)), "synthetic_label": PerBatch(labels)}

    def generated(self, codes: Tensor) -> Tensor:
        """Images of codes (n, D)."""
        return self.generator(rounded_up(codes))[: len(codes)] if codes.is_cuda else self.generator(codes)

    def forward(self, batch: Batch) -> Any:
        """Features (B, D) of the local images, and the head's output for these and, after them, the generated ones."""
        generated = hasattr(batch, "synthetic")
        features = self.net.features(torch.cat([batch.image, batch.synthetic]) if generated else batch.image)
        return SimpleNamespace(features=features[: batch.image.shape[0]], output=self.net.classify(features))

    def loss(self, batch: Batch, out: Any) -> Tensor:
        """One mean over local and generated images (Eq. 11)."""
        generated = hasattr(batch, "synthetic")
        if self.options.frozen:
            labels = torch.cat([batch.label, batch.synthetic_label]) if generated else batch.label
            return self.classifier.loss(out.output, labels)
        if not generated:
            return self.supervised(out.output, batch.label)
        # The site's class counts, which the supervised loss may use, do not hold for generated images.
        sizes = [len(batch.label), len(batch.synthetic_label)]
        local, made = out.output.split(sizes)
        losses = self.supervised(local, batch.label), F.cross_entropy(made, batch.synthetic_label)
        return (sizes[0] * losses[0] + sizes[1] * losses[1]) / sum(sizes)

    def predict(self, view: str, batch: Batch) -> Tensor:
        output = self.outputs(batch).output
        return self.classifier(output) if self.options.frozen else output


METHOD = Method(
    server=FedBMServer,
    client=FedBMClient,
    paper=(
        "Zhu et al., FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous Federated Learning, "
        "Medical Image Analysis 2025"
    ),
    year=2025,
    changes="frozen classifier made of text, generated images at the sites",
    options=Options,
)
