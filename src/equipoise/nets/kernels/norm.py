"""Batch norm, and the activation after it, in bfloat16 on a GPU, where torch cannot use cuDNN."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels.activations import ACTIVATIONS, name_of
from equipoise.nets.kernels.proof import Case, Kernels, random_values
from equipoise.nets.kernels.replacement import Replacement, exactly, layers_of_one_place, suits

#: shapes of few and of many rows, for which there are different kernels
FEW, MANY = (4, 16, 8, 8), (8, 40, 24, 24)
#: what MONAI's and the lite package's blocks call an activation, and the norms that it follows directly
BLOCKS = {"_swish": ("_bn0", "_bn1"), "act": ("bn1",)}


def _cases(kernels: ModuleType, device: torch.device) -> Iterator[Case]:
    many, few = random_values(MANY, device), random_values(FEW, device)
    yield _training_case(kernels, many, "relu")
    for activation in ("", *ACTIVATIONS):
        yield _training_case(kernels, few, activation)
    yield _training_case(kernels, with_nan(few), "relu")
    yield _frozen_case(kernels, many, "relu")


def _training_case(kernels: ModuleType, images: Tensor, activation: str) -> Case:
    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        running = fresh_statistics(weight)
        return kernels.BatchNormTraining.apply(x, weight, bias, running, 0.1, 1e-5, activation), *running[:2]

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        mean, variance, _ = fresh_statistics(weight)
        out = F.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5)
        return _activated(out, activation), mean, variance

    return Case(ours, torchs, [images, *weight_and_bias(images)])


def _frozen_case(kernels: ModuleType, images: Tensor, activation: str) -> Case:
    known = [torch.linspace(first, 1, images.shape[1], device=images.device) for first in (-0.5, -1, 0.3, 0.5)]
    weight, bias, mean, variance = known

    def torchs(x: Tensor) -> Tensor:
        return _activated(F.batch_norm(x, mean, variance, weight, bias, False, 0.1, 1e-5), activation)

    return Case(lambda x: kernels.FrozenBatchNorm.apply(x, *known, 1e-5, activation), torchs, [images])


def fresh_statistics(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Running mean and variance (C,), and their counter, before the first step."""
    count = torch.zeros((), dtype=torch.long, device=weight.device)
    return torch.zeros_like(weight), torch.ones_like(weight), count


def weight_and_bias(images: Tensor) -> list[Tensor]:
    """Different ones (C,) for each channel."""
    return [torch.linspace(first, 1, images.shape[1], device=images.device) for first in (0.5, -1)]


def with_nan(images: Tensor) -> Tensor:
    """The images with one NaN."""
    spoilt = images.clone()
    spoilt[0, 1, 0, 0] = torch.nan
    return spoilt


def _activated(values: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation].function(values) if activation else values


KERNELS = Kernels("norm_training", _cases, "batch norm by torch, which is slower in bfloat16")


class QuickBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d`, with kernels for images that suit them, in training and for gradients through a frozen layer.

    The layer after it must get the very tensor that comes out. If a hook put another tensor in its place, the
    activation would be done twice."""

    activation: str = ""
    """What follows directly and may be done at once, which then costs nothing."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), normalised; where the activation was done too, marked as `activated`."""
        if self.trains(images):
            out = KERNELS.module.BatchNormTraining.apply(images, *self.arguments())
        elif self._stands_still(images):
            fixed = (self.weight, self.bias, self.running_mean, self.running_var)
            out = KERNELS.module.FrozenBatchNorm.apply(images, *fixed, self.eps, self.activation)
        else:
            return super().forward(images)
        out.activated = bool(self.activation)
        return out

    def trains(self, images: Tensor) -> bool:
        """Whether the kernels can do these images in training; a single row is left to torch to refuse."""
        return self.training and suits(images) and images.numel() > images.shape[1]

    def _stands_still(self, images: Tensor) -> bool:
        """Whether gradients go through to these images alone."""
        wanted = torch.is_grad_enabled() and images.requires_grad
        fixed = not (self.training or self.weight.requires_grad or self.bias.requires_grad)
        return wanted and fixed and suits(images) and images.numel() > 0

    def arguments(self) -> tuple[Any, ...]:
        """What the kernels want to know beside the images."""
        running = (self.running_mean, self.running_var, self.num_batches_tracked)
        return self.weight, self.bias, running, self.momentum, self.eps, self.activation


def _usual(norm: nn.BatchNorm2d) -> bool:
    """Whether a norm has weight, bias and running statistics that move by a set share."""
    whole = norm.affine and norm.bias is not None and norm.track_running_stats
    return whole and norm.momentum is not None and norm.momentum > 0


def _join_activations(net: nn.Module) -> None:
    """Make activations part of the quick norms that they follow directly."""
    # A layer that is used in several places may be followed by something else in one of them.
    alone = {id(layer) for _, layer in layers_of_one_place(net)}
    for layer, following in list(_neighbours(net)):
        name = name_of(following)
        if isinstance(layer, QuickBatchNorm2d) and id(layer) in alone and name:
            layer.activation, following.__class__ = name, ACTIVATIONS[name].quick


def _neighbours(net: nn.Module) -> Iterator[tuple[nn.Module | None, nn.Module]]:
    """Layers, and the layers directly after them, in sequences and in known blocks."""
    for module in net.modules():
        if isinstance(module, nn.Sequential):
            yield from pairwise(module)
        for activation, norms in BLOCKS.items():
            if hasattr(module, activation):
                yield from ((getattr(module, norm, None), getattr(module, activation)) for norm in norms)


quicken_norms = Replacement(QuickBatchNorm2d, exactly(nn.BatchNorm2d, _usual), KERNELS, settle=_join_activations)
