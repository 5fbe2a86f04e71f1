"""What FedBM's server and sites build alike: the net, the classifier made of text, codes and the generator.

Zhu et al., FedBM, Medical Image Analysis 2025.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.contract.method import Setting
from equipoise.core.streams import stream
from equipoise.data.augment import build_augmentation
from equipoise.data.augment.draws import WHITE
from equipoise.nets import Net, build_net
from equipoise.nets.concepts import find_bank, load_bank
from equipoise.nets.concepts.distributions import ConceptClassifier, ConditionCodes
from equipoise.nets.generator import ConditionalGenerator
from equipoise.prototypes import concept_statistics


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
