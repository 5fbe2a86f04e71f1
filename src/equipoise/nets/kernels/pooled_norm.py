"""Batch norm, the activation after it and max pooling after that, all at once in bfloat16 on a GPU: what lies between
them, at the full size of the images, is neither written nor read."""

from __future__ import annotations

from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels.activations import Follows
from equipoise.nets.kernels.norm import QuickBatchNorm2d, quick_kernels
from equipoise.nets.kernels.pool import QuickMaxPool2d, sides_even
from equipoise.nets.kernels.proof import assert_alike, proven, random_images

#: the shape with which the kernels prove themselves
PROBE = (4, 40, 18, 16)


class PooledBatchNorm2d(QuickBatchNorm2d):
    """A quick batch norm that an activation follows, and `QuickMaxPool2d` that."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), normalised; where both were done too, (B, C, H / 2, W / 2), marked as `activated` and
        `pooled`."""
        if not (self.trains(images) and sides_even(images)):
            return super().forward(images)
        kernels = quick_pooled_kernels()
        assert kernels is not None
        out = kernels.PooledBatchNormTraining.apply(images, *self.arguments())
        out.activated = out.pooled = True
        return out


@lru_cache(maxsize=1)
def quick_pooled_kernels() -> ModuleType | None:
    """The kernels where they work, else None."""
    load = partial(import_module, "equipoise.nets.kernels.pooled_norm_kernels")
    return proven(load, prove, "batch norm and max pooling one after the other, which takes longer")


def prove(kernels: ModuleType, device: torch.device) -> None:
    """Compare the kernels with those for batch norm, and torch's max pooling after them, on random values.

    Raises:
        AssertionError: when they differ by more than rounding
    """
    plain = random_images(PROBE, device, 0)
    spoilt = plain.clone()
    spoilt[0, 1, 0, 0] = torch.nan
    for values in (plain, spoilt):
        _compare(kernels, values)


def _compare(kernels: ModuleType, values: Tensor) -> None:
    norms = quick_kernels()
    assert norms is not None
    given = random_images((*PROBE[:2], PROBE[2] // 2, PROBE[3] // 2), values.device, 1)
    weight, bias = (torch.linspace(first, 1, PROBE[1], device=values.device).requires_grad_() for first in (0.5, -1))
    results = []
    for at_once in (True, False):
        mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
        running = (mean, variance, torch.zeros((), dtype=torch.long, device=values.device))
        x = values.detach().requires_grad_()
        norm = kernels.PooledBatchNormTraining if at_once else norms.BatchNormTraining
        out = norm.apply(x, weight, bias, running, 0.1, 1e-5, "relu")
        out = out if at_once else F.max_pool2d(out, 2)
        results.append((out, *torch.autograd.grad(out, (x, weight, bias), given), mean, variance))
    for ours, others in zip(*results):
        assert_alike(ours, others)


def quicken_pooled_norms(net: nn.Module) -> None:
    """Let the net's quick batch norms do what follows them in a sequence, if that is an activation and max pooling."""
    sequences = [list(module) for module in net.modules() if isinstance(module, nn.Sequential)]
    triples = [triple for layers in sequences for triple in zip(layers, layers[1:], layers[2:])]
    kinds = (QuickBatchNorm2d, Follows, QuickMaxPool2d)
    found = [triple[0] for triple in triples if all(map(isinstance, triple, kinds)) and triple[0].activation]
    if found and quick_pooled_kernels() is not None:
        for norm in found:
            norm.__class__ = PooledBatchNorm2d
