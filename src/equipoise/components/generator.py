"""A generator, trained on the server against the global model, makes images that stand beside the sites' own (FedBM's
CGDE, Eqs. 6 to 11).

On features of a frozen encoder it makes features instead of images. That is a variant of ours, not the paper's.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from equipoise.components._generator_training import GeneratorTraining, Parts
from equipoise.components._texts import TextOptions, Texts
from equipoise.contract.client import PerBatch
from equipoise.contract.component import Batch, Message, ServerSide, SiteSide
from equipoise.contract.protocol import Payload, Replies, Tensors, Work
from equipoise.nets.rounding import rounded_up

OF_FEATURES = (
    "the generator makes features of the frozen encoder instead of images: a variant of Equipoise's own, which FedBM's "
    "paper does not have"
)
GENERATED_AT_ONCE = 256  # images, to bound the memory of the generator's feature maps


class GeneratorServer(ServerSide):
    """Trains the generator every few rounds against the average."""

    def setup(self) -> None:
        self.parts = Parts(self.setting, self.options)
        self.parts.net = self.server.new_net()
        self.concepts = self.side("concepts")
        if self.concepts is not None:
            self.parts.classifier = self.concepts.options.made(self.setting)
        self.state.codes, self.state.generator = _copied(self.parts.codes), _copied(self.parts.generator)
        self.training = GeneratorTraining(self.parts, self.setting, self.options)

    def message(self, number: int) -> Message:
        if number <= self.options.every:
            return {}
        return {"codes": self.state.codes, "generator": self.state.generator}

    def after(self, number: int, updates: Replies, before: Tensors, model: Tensors) -> Tensors:
        """Every few rounds, some steps on Eq. 10 against the global model, the teacher, which stands still."""
        if number % self.options.every == 0 and number < self.setting.config.train.rounds:
            self.server.later(partial(self._learn, number, model))
        return model

    def _learn(self, number: int, model: Tensors) -> None:
        """Train the generator against a model; sites get it with the next round."""
        if self.parts.classifier is not None:
            self.parts.classifier.load_state_dict(self.concepts.state.classifier)
        self.parts.codes.load_state_dict(self.state.codes)
        self.parts.generator.load_state_dict(self.state.generator)
        self.parts.net.load_state_dict(model)
        self.training.run(self.random("generator", number))
        self.state.generator = _copied(self.parts.generator)
        self.note("loss", self.training.reached)
        if self.parts.of_images:
            self.server.show("generated", self.training.samples(number))


def _copied(module: nn.Module) -> Tensors:
    return {name: value.clone() for name, value in module.state_dict().items()}


class GeneratorSite(SiteSide):
    """Trains on its own images and on those that the generator makes."""

    #: what draws labels and codes of generated images, in an ask that brings a generator
    synthesis: torch.Generator | None = None

    def build(self) -> None:
        parts = Parts(self.setting, self.options)
        self.shown = parts.shown
        self.codes = self.receives("codes", self.client.reference(parts.codes))
        self.generator = self.receives("generator", self.client.reference(parts.generator))

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        if self.client.spaced(self.options, "generator") in message:
            self.synthesis = self.client.random("synthesis")
        yield from ()

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        """Generated images (batches, synthetic, C, H, W) and their labels, uniform over classes, for every batch.

        As in the generator's training, and as released, each batch is shifted and flipped.
        """
        if self.synthesis is None:
            return {}
        shape = (chunk.batches, self.options.synthetic)
        labels = torch.randint(self.num_classes, shape, generator=self.synthesis, device=self.setting.device)
        codes = self.codes.draw(labels.flatten(), self.synthesis)
        with self.client.workplace.precision():
            images = torch.cat([self.generated(some) for some in codes.split(GENERATED_AT_ONCE)]).float()
        shown = self.shown(images.unflatten(0, shape), self.synthesis).flatten(0, 1)
        if self.setting.config.compute.channels_last:  # as local images lie, which they stand beside
            shown = shown.contiguous(memory_format=torch.channels_last)
        return {"synthetic": PerBatch(shown.unflatten(0, shape)), "synthetic_label": PerBatch(labels)}

    def generated(self, codes: Tensor) -> Tensor:
        """Images of codes (n, D)."""
        return self.generator(rounded_up(codes))[: len(codes)] if codes.is_cuda else self.generator(codes)

    def images(self, batch: Batch) -> Tensor | None:
        return getattr(batch, "synthetic", None)

    def labels(self, batch: Batch) -> Tensor | None:
        return getattr(batch, "synthetic_label", None)


class GeneratorOptions(TextOptions):
    """What the generator is made of and how it learns."""

    condition: Literal["text", "gaussian"] = Field("text", description="input of the generator: concepts or noise")
    lambda_div: float = Field(1.0, ge=0, description="weight of the generator's diversity term (Eq. 7)")
    lambda_dis: float = Field(0.1, ge=0, description="weight of the generator's batch-norm term (Eq. 8)")
    synthetic: PositiveInt = Field(16, description="generated images beside each local batch")
    every: PositiveInt = Field(5, description="rounds between two trainings of the generator")
    generator_steps: PositiveInt = Field(100, description="steps of one training of the generator")
    generator_batch: int = Field(64, ge=2, description="images of each of these steps")
    generator_lr: PositiveFloat = Field(3e-4, description="learning rate of these steps (Adam, betas 0.5 and 0.999)")
    generator_width: PositiveInt = Field(64, description="channels of the generator's last layers")


class GeneratorComponent(GeneratorOptions, Texts):
    """Generated images."""

    name: ClassVar[str] = "generator"
    paper: ClassVar[str] = "Zhu et al., FedBM, Medical Image Analysis 2025"
    rank: ClassVar[int] = 85  # after server steps: the generator learns against the model that sites get next
    limit: ClassVar[Mapping[str, Any]] = {"every": 10**6}
    in_short: ClassVar[tuple[str, ...]] = ("generator.every=1", "generator.generator_steps=20")
    at_little_cost: ClassVar[tuple[str, ...]] = (
        "generator.generator_steps=2",
        "generator.generator_batch=8",
        "generator.generator_width=4",
        "generator.synthetic=4",
    )
    Site: ClassVar[type[SiteSide]] = GeneratorSite
    Server: ClassVar[type[ServerSide]] = GeneratorServer

    def needs(self) -> AbstractSet[str]:
        own = {"model", "whole model", "one model", "plain forward", "plain loss", "supervised", "one training ask"}
        return own | {"image labels"} | ({"batch norm"} if self.lambda_dis else set())

    def remarks(self, setting: Any) -> list[str]:
        return [] if setting.features is None else [OF_FEATURES]

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        rounds = None if setting is None else setting.config.train.rounds
        if rounds is None or rounds > self.every:
            return {}
        why = f"the generator is first trained after round {self.every}, and there are {rounds} rounds"
        return {"every": f"{why}; set it lower, or train.rounds higher"}

    #: told even at its default
    distinctive: ClassVar[tuple[str, ...]] = ("every",)


COMPONENT = GeneratorComponent
