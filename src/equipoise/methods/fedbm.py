"""FedBM: a frozen classifier made of what a language model knows about the classes, and a generator, trained on the
server against the global model, whose images hold the sites' feature extractors together.

Zhu et al., FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous Federated Learning, Medical
Image Analysis 2025. LKCC is the classifier (Eqs. 2 to 5), CGDE the generator (Eqs. 6 to 10).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.concepts import DEFAULT_ENCODER, find_bank, load_bank
from equipoise.concepts.distributions import ConceptClassifier, ConditionCodes
from equipoise.config import Table
from equipoise.data.augment import build_augmentation
from equipoise.data.augment.draws import WHITE
from equipoise.engine.contract import Batch, Method, PerBatch, Setting
from equipoise.engine.protocol import Action, Ask, Conversation, Payload, PerSite, Tensors, Value
from equipoise.losses import diversity, norm_statistics_gap
from equipoise.methods.common import average
from equipoise.methods.fedavg import FedAvgClient, FedAvgServer
from equipoise.nets import Net, build_net
from equipoise.nets.generator import ConditionalGenerator
from equipoise.prototypes import concept_statistics
from equipoise.streams import stream

CROP_MARGIN = 4  # pixels that generated images are shifted by at most while the generator learns
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


# ---- what server and sites build alike ---------------------------------------------------------------------


def concept_embeddings(setting: Setting) -> Tensor:
    """Embeddings (C, M, D) of the prompts that this run uses, from a concept bank."""
    options, data, classes = setting.options, setting.config.data, setting.task.classes
    bank = load_bank(Path(options.bank)).select(classes) if options.bank else find_bank(data, classes, options.encoder)
    embeddings = (bank.as_released() if options.concepts == "released" else bank).embeddings
    available = embeddings.shape[1]
    wanted = max(round(options.prompt_share * available), 1)
    draw = torch.Generator().manual_seed(stream(setting.config.seed, "prompts"))
    chosen = torch.randperm(available, generator=draw)[:wanted].sort().values
    return embeddings[:, chosen].to(setting.device)


def concept_classifier(setting: Setting, embeddings: Tensor) -> ConceptClassifier:
    """The frozen classifier that the options ask for; a random one has unit directions in place of the texts."""
    kind = setting.options.classifier
    mean, variance = concept_statistics(embeddings)
    if kind == "random":
        mean = setting.seeded("classifier", lambda: F.normalize(torch.randn(mean.shape), dim=-1))
    if kind != "distribution":
        variance = torch.zeros_like(variance)
    return ConceptClassifier(mean, variance, setting.options.temperature)


class Parts:
    """The modules of a run in their first state. Under a frozen classifier the net's head is the linear layer onto
    text embeddings; classifier, codes and generator are there only where the options ask for them."""

    classifier: ConceptClassifier
    codes: ConditionCodes
    generator: ConditionalGenerator

    def __init__(self, setting: Setting):
        config, options, channels = setting.config, setting.options, setting.channels
        augmentation = build_augmentation(config.augment, setting.image_size, channels)
        self.normalise = augmentation.plain.normalise
        if not options.frozen:
            self.net: Net = setting.new_net()
        if options.frozen or options.cgde:
            embeddings = concept_embeddings(setting)
            width = embeddings.shape[-1]
        if options.frozen:
            self.net = setting.seeded("net", lambda: build_net(config.net, width, channels))
            self.classifier = concept_classifier(setting, embeddings)
        if options.cgde:
            text = options.condition == "text"
            self.codes = ConditionCodes.of_texts(embeddings) if text else ConditionCodes.gaussian(embeddings)
            self.generator = setting.seeded(
                "generator", lambda: ConditionalGenerator(width, augmentation.size, channels, options.generator_width)
            )

    def show(self, images: Tensor) -> Tensor:
        """Generated images (B, C, H, W), from 0 to 1, normalised as real ones are."""
        return self.normalise(WHITE * images)


# ---- the server --------------------------------------------------------------------------------------------


class FedBMServer(FedAvgServer):
    """Makes the classifier once, averages the nets, and every few rounds trains the generator against the average."""

    def build(self) -> nn.Module:
        self.parts = Parts(self.setting)
        return self.parts.net

    def setup(self) -> None:
        super().setup()
        if self.options.frozen:
            self.state.classifier = _copied(self.parts.classifier)
        if self.options.cgde:
            self.state.codes, self.state.generator = _copied(self.parts.codes), _copied(self.parts.generator)

    def message(self) -> dict[str, Value | PerSite]:
        frozen: dict[str, Value | PerSite] = {"classifier": self.state.classifier} if self.options.frozen else {}
        return {**super().message(), **frozen}

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        options, message = self.options, self.message()
        if options.cgde and number > options.every:
            message |= {"codes": self.state.codes, "generator": self.state.generator}
        updates = yield Ask("train", sites, **message)
        self.state.model = average(updates, "model", self.setting.config.train.aggregation)
        if options.cgde and number % options.every == 0:
            self.state.generator = self.train_generator(self.random("generator", number))

    def train_generator(self, random: torch.Generator) -> Tensors:
        """The generator after some steps on Eq. 10 against the global model, the teacher, which stands still."""
        options, setting, parts = self.options, self.setting, self.parts
        for name in ("classifier", "codes", "generator"):
            if name in self.state:
                getattr(parts, name).load_state_dict(getattr(self.state, name))
        parts.generator.train()
        parts.net.eval()
        optimiser = torch.optim.Adam(parts.generator.parameters(), options.generator_lr, betas=(0.5, 0.999))
        for _ in range(options.generator_steps):
            shape = (options.generator_batch,)
            labels = torch.randint(setting.num_classes, shape, generator=random, device=setting.device)
            codes = parts.codes.draw(labels, random)
            loss = self.generator_loss(parts.generator(codes), codes, labels, random)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return _copied(parts.generator)

    def generator_loss(self, images: Tensor, codes: Tensor, labels: Tensor, random: torch.Generator) -> Tensor:
        """L_sem + lambda_div L_div + lambda_dis L_dis (Eq. 10) of images (B, C, H, W) made from codes (B, D)."""
        options, parts = self.options, self.parts
        with norm_inputs(parts.net) as seen:
            shown = parts.show(jittered(images, random))
            output = torch.func.functional_call(parts.net, self.state.model, (shown,))
        loss = parts.classifier.loss(output, labels) if options.frozen else F.cross_entropy(output, labels)
        if options.lambda_div:
            loss = loss + options.lambda_div * diversity(codes, images, labels, self.setting.num_classes)
        if options.lambda_dis:
            loss = loss + options.lambda_dis * norm_statistics_gap(*zip(*seen))
        return loss


def _copied(module: nn.Module) -> Tensors:
    return {name: value.clone() for name, value in module.state_dict().items()}


def jittered(images: Tensor, random: torch.Generator) -> Tensor:
    """Images (B, C, H, W) shifted by a few pixels onto black and perhaps flipped: one draw for the whole batch.

    Rows and columns are picked by their places, which the device works out: the host need not know what was drawn.
    """
    shifts = torch.randint(2 * CROP_MARGIN + 1, (2,), generator=random, device=random.device)
    flips = torch.randint(2, (2,), generator=random, device=random.device).bool()
    shown = F.pad(images, (CROP_MARGIN,) * 4)
    for axis, shift, flip in zip((-2, -1), shifts, flips):
        places = torch.arange(images.shape[axis], device=images.device)
        shown = shown.index_select(axis, shift + torch.where(flip, places.flip(0), places))
    return shown


@contextmanager
def norm_inputs(net: nn.Module) -> Iterator[list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Note what the net's 2-D batch norms are given: per layer the mean and biased variance of the batch and the
    running mean and variance, (channels,) each. The hooks are gone at the end."""
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def note(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        variance, mean = torch.var_mean(inputs[0], dim=(0, 2, 3), correction=0)
        seen.append((mean, variance, layer.running_mean, layer.running_var))

    hooks = [part.register_forward_pre_hook(note) for part in net.modules() if isinstance(part, nn.BatchNorm2d)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


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
        return ("train.loss",) if setting.options.classifier != "learned" else ()

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
        """Generated images (batches, synthetic, C, H, W) and their labels, uniform over classes, for every batch."""
        if self.synthesis is None:
            return {}
        shape = (chunk.batches, self.options.synthetic)
        labels = torch.randint(self.num_classes, shape, generator=self.synthesis, device=self.setting.device)
        codes = self.codes.draw(labels.flatten(), self.synthesis)
        images = torch.cat([self.generator(some) for some in codes.split(GENERATED_AT_ONCE)])
        return {"synthetic": PerBatch(self.show(images).unflatten(0, shape)), "synthetic_label": PerBatch(labels)}

    def forward(self, batch: Batch) -> Any:
        """Features (B, D) of the local images, and the head's output for these and, after them, the generated ones."""
        generated = hasattr(batch, "synthetic")
        features = self.net.features(torch.cat([batch.image, batch.synthetic]) if generated else batch.image)
        return SimpleNamespace(features=features[: len(batch.image)], output=self.net.classify(features))

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
