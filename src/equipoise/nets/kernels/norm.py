"""Batch norm, and the activation after it, quick in bfloat16 on a GPU, where torch does without cuDNN for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels.activations import ACTIVATIONS, name_of
from equipoise.nets.kernels.owners import layers_of_one_place
from equipoise.nets.kernels.proof import assert_alike, proven, random_images, suits

#: shapes of few and of many rows, and activations, with which the kernels prove themselves
FEW, MANY = (4, 16, 8, 8), (8, 40, 24, 24)
PROBES = ((MANY, "relu"), *((FEW, activation) for activation in ("", *ACTIVATIONS)))


class QuickBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d`, by kernels of its own for bfloat16 images that lie channels-last on a GPU, in training and when
    gradients go through a layer that stands still.

    The layer after it has to get the very tensor that comes out: a hook that puts another in its place would have the
    activation done twice."""

    activation: str = ""
    """What follows directly and may be done at once, which then costs nothing."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), normalised; where the activation was done too, marked as `activated`."""
        if self.trains(images):
            out = _kernels().BatchNormTraining.apply(images, *self.arguments())
        elif self._stands_still(images):
            fixed = (self.weight, self.bias, self.running_mean, self.running_var)
            out = _kernels().FrozenBatchNorm.apply(images, *fixed, self.eps, self.activation)
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


#: what MONAI's and the lite package's blocks call an activation, and the norms that it follows directly
BLOCKS = {"_swish": ("_bn0", "_bn1"), "act": ("bn1",)}


def _kernels() -> ModuleType:
    kernels = quick_kernels()
    assert kernels is not None
    return kernels


@lru_cache(maxsize=1)
def quick_kernels() -> ModuleType | None:
    """The kernels where they work, else None."""
    load = partial(import_module, "equipoise.nets.kernels.norm_training")
    return proven(load, prove, "batch norm by torch, which is slower in bfloat16")


def prove(kernels: ModuleType, device: torch.device) -> None:
    """Compare the kernels with torch's batch norm on random values.

    Raises:
        AssertionError: when they differ by more than rounding
    """
    for shape, activation in PROBES:
        _compare(kernels, random_images(shape, device, 0), activation)
    spoilt = random_images(FEW, device, 0)
    spoilt[0, 1, 0, 0] = torch.nan
    _compare(kernels, spoilt, "relu")
    _compare_frozen(kernels, random_images(MANY, device, 0), "relu")


def _compare(kernels: ModuleType, values: Tensor, activation: str) -> None:
    shape, device = tuple(values.shape), values.device
    given = random_images(shape, device, 1)
    weight, bias = (torch.linspace(first, 1, shape[1], device=device).requires_grad_() for first in (0.5, -1))
    results = []
    for quick in (True, False):
        mean, variance, count = torch.zeros_like(weight), torch.ones_like(weight), torch.zeros((), device=device).long()
        x = (values if quick else values.float()).detach().requires_grad_()
        if quick:
            out = kernels.BatchNormTraining.apply(x, weight, bias, (mean, variance, count), 0.1, 1e-5, activation)
        else:
            out = _activated(F.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5), activation)
        found = torch.autograd.grad(out, (x, weight, bias), given.to(out.dtype))
        results.append((out, *found, mean, variance))
    for ours, torchs in zip(*results):
        assert_alike(ours, torchs)


def _compare_frozen(kernels: ModuleType, values: Tensor, activation: str) -> None:
    given = random_images(tuple(values.shape), values.device, 1)
    known = [torch.linspace(first, 1, values.shape[1], device=values.device) for first in (-0.5, -1, 0.3, 0.5)]
    weight, bias, mean, variance = known
    ours, torchs = (values.detach().clone().requires_grad_() for _ in range(2))
    out = kernels.FrozenBatchNorm.apply(ours, *known, 1e-5, activation)
    usual = _activated(F.batch_norm(torchs.float(), mean, variance, weight, bias, False, 0.1, 1e-5), activation)
    assert_alike(out, usual)
    assert_alike(*torch.autograd.grad(out, ours, given), *torch.autograd.grad(usual, torchs, given.float()))


def _activated(values: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation].function(values) if activation else values


def quicken_norms(net: nn.Module) -> None:
    """Let the net's batch norms be quick in bfloat16 on a GPU, and activations that follow one directly be part of it.

    Names and values of its state stay as they are.
    """
    if quick_kernels() is None:
        return
    for module in net.modules():
        if type(module) is nn.BatchNorm2d and _usual(module):
            module.__class__ = QuickBatchNorm2d
    # What is used in several places may be followed by something else in one of them.
    alone = {id(layer) for _, layer in layers_of_one_place(net)}
    for layer, following in list(_neighbours(net)):
        name = name_of(following)
        if isinstance(layer, QuickBatchNorm2d) and id(layer) in alone and name:
            layer.activation, following.__class__ = name, ACTIVATIONS[name].quick


def _usual(norm: nn.BatchNorm2d) -> bool:
    """Whether a norm has weight, bias and running statistics that move by a set share."""
    whole = norm.affine and norm.bias is not None and norm.track_running_stats
    return whole and norm.momentum is not None and norm.momentum > 0


def _neighbours(net: nn.Module) -> Iterator[tuple[nn.Module | None, nn.Module]]:
    """Layers, and what follows them directly: in a sequence, or in a block of which that is known."""
    for module in net.modules():
        if isinstance(module, nn.Sequential):
            yield from pairwise(module)
        for activation, norms in BLOCKS.items():
            if hasattr(module, activation):
                yield from ((getattr(module, norm, None), getattr(module, activation)) for norm in norms)
