"""How FedBM's server trains its generator: on Eqs. 6 to 10, against the global model.

Zhu et al., FedBM, Medical Image Analysis 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.contract.optimiser import Optimiser
from equipoise.contract.repeat import Repeated
from equipoise.contract.setting import Setting
from equipoise.contract.tables import OptimiserConfig
from equipoise.data.augment.draws import WHITE
from equipoise.losses import diversity, norm_statistics_gap
from equipoise.nets import Net
from equipoise.nets.concepts.distributions import ConceptClassifier, ConditionCodes
from equipoise.nets.conditional_generator import ConditionalGenerator
from equipoise.nets.feature_generator import FeatureGenerator
from equipoise.nets.kernels import moments

CROP_MARGIN = 4  # pixels that generated images are shifted by at most while the generator learns
SHOWN_OF_CLASS = 8  # generated images that a run's folder shows
BETAS = (0.5, 0.999)  # of Adam


class Parts:
    """Codes and generator in their first state, and on the server the net and classifier that they train against."""

    net: Net
    classifier: ConceptClassifier | None = None  # none: the net's own logits count

    def __init__(self, setting: Setting, options: Any):
        augmentation = setting.augmentation()
        self.normalise = augmentation.plain.normalise
        self.of_images = setting.features is None
        embeddings = options.embeddings(setting)
        text, width = options.condition == "text", embeddings.shape[-1]
        self.codes = ConditionCodes.of_texts(embeddings) if text else ConditionCodes.gaussian(embeddings)
        self.generator = setting.seeded(
            "generator",
            lambda: (
                ConditionalGenerator(width, augmentation.size, setting.channels, options.generator_width)
                if setting.features is None
                else FeatureGenerator(width, setting.features.shape, options.generator_width)
            ),
        )

    def shown(self, batches: Tensor, random: torch.Generator) -> Tensor:
        """Batches (n, B, C, H, W) as a net takes them: images jittered and normalised; features unchanged."""
        return self.show(jittered(batches, random)) if self.of_images else batches

    def show(self, images: Tensor) -> Tensor:
        """Generated images (B, C, H, W), from 0 to 1, normalised as real ones are."""
        return self.normalise(WHITE * images)


class GeneratorTraining:
    """Trains the generator of some parts against their net, the teacher, which stands still."""

    def __init__(self, parts: Parts, setting: Setting, options: Any):
        self.parts = parts
        self.options = options
        self.precision = setting.precision
        self.num_classes = setting.num_classes
        self.random = torch.Generator(device=setting.device)
        self.optimiser = Optimiser(
            parts.generator.named_parameters(), OptimiserConfig(name="adam", betas=BETAS, lr=self.options.generator_lr)
        )
        if setting.autocasts:
            moments.KERNELS.usable()  # the proof must not come in the middle of a step
        #: the loss of the last step
        self.reached = torch.zeros((), device=setting.device)
        self.repeated = Repeated(setting.device, self.random, setting.config.compute.capture)

    def run(self, random: torch.Generator) -> None:
        """Some steps from the current generator, with new moments of Adam."""
        self.random.set_state(random.get_state())
        for tensor in self.optimiser.state().values():
            tensor.zero_()
        self.optimiser.lr.fill_(self.options.generator_lr)
        self.parts.generator.train()
        self.parts.net.eval().requires_grad_(False)
        self.repeated(self.step, self.options.generator_steps)

    @torch.no_grad()
    def samples(self, number: int, each: int = SHOWN_OF_CLASS) -> Tensor:
        """A few images of each class (n, C, H, W), from 0 to 1, drawn apart from everything that is trained on."""
        random = torch.Generator(device=self.random.device).manual_seed(number)
        labels = torch.arange(self.num_classes, device=random.device).repeat_interleave(each)
        with self.precision():
            return self.parts.generator(self.parts.codes.draw(labels, random)).float()

    def step(self) -> None:
        """One step on as many labels of every class as chance gives."""
        labels = torch.randint(
            self.num_classes, (self.options.generator_batch,), generator=self.random, device=self.random.device
        )
        codes = self.parts.codes.draw(labels, self.random)
        with self.precision():
            images = self.parts.generator(codes).float()
        loss = self.loss(images, codes, labels)
        self.reached.copy_(loss.detach())
        self.optimiser.update(torch.autograd.grad(loss, self.optimiser.parameters))

    def loss(self, images: Tensor, codes: Tensor, labels: Tensor) -> Tensor:
        """L_sem + lambda_div L_div + lambda_dis L_dis (Eq. 10) of images (B, C, H, W) made from codes (B, D)."""
        options, parts = self.options, self.parts
        shown = parts.shown(images[None], self.random)[0]
        with norm_inputs(parts.net) as seen, self.precision():
            output = parts.net(shown).float()
        frozen = parts.classifier
        loss = F.cross_entropy(output, labels) if frozen is None else frozen.loss(output, labels)
        if options.lambda_div:
            loss = loss + options.lambda_div * diversity(codes, images, labels, self.num_classes)
        if options.lambda_dis:
            loss = loss + options.lambda_dis * norm_statistics_gap(*zip(*seen))
        return loss


def jittered(batches: Tensor, random: torch.Generator) -> Tensor:
    """Batches of images (n, B, C, H, W), shifted by a few pixels onto black and perhaps flipped: a draw for each batch.

    Rows and columns are picked by their places, which the device works out: the host need not know what was drawn.
    """
    shifts = torch.randint(2 * CROP_MARGIN + 1, (len(batches), 2), generator=random, device=random.device)
    flips = torch.randint(2, (len(batches), 2), generator=random, device=random.device).bool()
    shown = F.pad(batches, (CROP_MARGIN,) * 4)
    for axis in (0, 1):
        places = torch.arange(batches.shape[axis - 2], device=batches.device)
        wanted = shifts[:, axis, None] + torch.where(flips[:, axis, None], places.flip(0), places)
        shape = (-1, 1, 1, wanted.shape[1], 1) if axis == 0 else (-1, 1, 1, 1, wanted.shape[1])
        shown = shown.take_along_dim(wanted.reshape(shape), dim=axis + 3)
    return shown


@contextmanager
def norm_inputs(net: nn.Module) -> Iterator[list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Note what the net's batch norms are given: per layer the mean and biased variance of the batch and the
    running mean and variance, (channels,) each. The hooks are gone at the end."""
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def note(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        maps = inputs[0] if inputs[0].ndim == 4 else inputs[0][:, :, None, None]  # features have one pixel
        seen.append((*moments.channel_moments(maps), layer.running_mean, layer.running_var))

    kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
    hooks = [layer.register_forward_pre_hook(note) for layer in net.modules() if isinstance(layer, kinds)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
