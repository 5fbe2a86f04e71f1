"""Differential privacy for single images: every step clips the gradient of each image, adds these up, and adds noise.

Abadi et al., Deep Learning with Differential Privacy, CCS 2016. Opacus computes the gradients of single images.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import UserError
from equipoise.core.extras import imported
from equipoise.core.streams import generator, stream

#: added to norms, so that a gradient of zeros can be divided by its norm
TINY = 1e-6

Key = int | bytes
"""What noise is made of: a run's seed, or a site's secret."""

#: a generator on the CPU (mt19937) has so many words of 32 bits, 8 bytes for each, from this byte of its state on
WORDS, WORDS_AT = 624, 24


@dataclass(frozen=True)
class Budget:
    """What a site may reveal, and the noise that keeps to it.

    Args:
        images: training images, by the noisy counts; sampling rate and steps follow from it
        rate: chance of an image to be in a step
        steps_of_epoch: steps of one local epoch
        steps: steps of a whole run
        noise: standard deviation of a step's noise, in units of the clipping norm
        counts_noise: standard deviation of the noise on the number of training images of each class
        releases: how often confusion matrices of the same images leave the site in a whole run
        scores_noise: standard deviation of the noise on each cell of a confusion matrix
        epsilon: what the training images' budget comes to
        scores_epsilon: what the budget of validation and test images comes to
    """

    images: int
    rate: float
    steps_of_epoch: int
    steps: int
    noise: float
    counts_noise: float
    releases: int
    scores_noise: float
    epsilon: float
    scores_epsilon: float


class PrivateSteps:
    """Turns a loss over a batch into a private mean gradient.

    The engine sets `budget` and `noise` before a site trains. Modules must treat images one by one.

    Attributes:
        draws: at a hospital, what decides which images are in a step; a server that knew them would learn more
    """

    budget: Budget
    noise: torch.Generator
    draws: torch.Generator | None = None

    def __init__(self, modules: Iterable[nn.Module], clip: float):
        # The first layer's images need no gradient, which torch warns of.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        hooks = imported("opacus.grad_sample", "privacy", "differential privacy").GradSampleHooks
        self.clip = clip
        self._hooks = [hooks(_apart(module), loss_reduction="mean") for module in modules]

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The mean over an expected batch of clipped gradients, with noise; `loss` is a mean over images."""
        loss.backward()
        samples = [_collected(parameter) for parameter in parameters]
        found = [sample for sample in samples if sample is not None]
        norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in found]).norm(dim=0)
        factors = (self.clip / (norms + TINY)).clamp(max=1.0)
        sums = [
            torch.zeros_like(parameter) if sample is None else torch.einsum("n,n...->...", factors, sample)
            for parameter, sample in zip(parameters, samples, strict=True)
        ]
        return self._noisy(sums)

    def of_no_image(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of a step that drew no image: noise alone."""
        return self._noisy([torch.zeros_like(parameter) for parameter in parameters])

    def _noisy(self, sums: Sequence[Tensor]) -> list[Tensor]:
        deviation, expected = self.budget.noise * self.clip, max(self.budget.rate * self.budget.images, 1.0)
        return [(total + deviation * _normal(total, self.noise)) / expected for total in sums]

    def draw(self, images: int, randomness: torch.Generator) -> list[Tensor]:
        """The images of an epoch's steps: each image is in each step with one chance, as the accountant assumes.

        Args:
            randomness: of the run, where the site has no `draws` of its own
        """
        secret = self.draws or randomness
        chances = (torch.rand(images, generator=secret) for _ in range(self.budget.steps_of_epoch))
        return [(chance < self.budget.rate).nonzero().flatten() for chance in chances]


def source(device: torch.device | str, key: Key, *names: str | int) -> torch.Generator:
    """The generator of a named noise. A secret fills the whole state of a generator on the CPU.

    There torch takes 32 bits of a seed, and a server could try them all.
    """
    if isinstance(key, int):
        return generator(device, key, *names)
    text = "\x1f".join([key.hex(), *map(str, names)]).encode()
    made = torch.Generator(device=device).manual_seed(stream(int.from_bytes(key, "big"), *names))
    if made.device.type == "cpu":
        words = torch.frombuffer(bytearray(hashlib.shake_256(text).digest(4 * WORDS)), dtype=torch.int32).long()
        state = made.get_state()
        state[WORDS_AT : WORDS_AT + 8 * WORDS] = (words & 0xFFFFFFFF).view(torch.uint8)
        made.set_state(state)
    return made


def noisy_counts(counts: Tensor, deviation: float, key: Key, site: str) -> Tensor:
    """Numbers of images by class (C,), with noise of their own for these numbers and this deviation; never below zero.

    Equal noise times two deviations would let a server of two runs take it off.
    """
    randomness = source("cpu", key, "noise of counts", site, str(deviation), *map(int, counts.tolist()))
    noise = torch.randn(counts.shape, generator=randomness, dtype=torch.float64)
    return (counts.cpu().double() + deviation * noise).round().clamp(min=0).to(counts)


def noisy_confusion(confusion: Tensor, deviation: float, key: Key, *where: str | int) -> Tensor:
    """A confusion matrix (C, C) with noise on every cell; the same model on the same images gets the same noise."""
    noise = torch.randn(confusion.shape, generator=source("cpu", key, "noise of scores", *where))
    return (confusion.cpu() + deviation * noise.double()).round().clamp(min=0).to(confusion.dtype)


def _apart(module: nn.Module) -> nn.Module:
    """The module, checked: no layer mixes images, and none works in place, which Opacus's hooks forbid."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"privacy.epsilon needs layers that treat images one by one, and {name or 'the net'} is a batch norm: "
                "set net.group_norm = true, or choose a net without batch norm"
            )
        if getattr(layer, "inplace", False):
            layer.inplace = False
    return module


def _collected(parameter: Tensor) -> Tensor | None:
    """The gradients of single images that Opacus left at a parameter; nothing stays behind."""
    sample: Any = getattr(parameter, "grad_sample", None)
    parameter.grad = None
    parameter.grad_sample = None  # type: ignore[attr-defined]
    return torch.stack(sample).sum(0) if isinstance(sample, list) else sample


def _normal(like: Tensor, randomness: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=randomness, device=like.device, dtype=like.dtype)
