"""Batch norm, the activation after it and max pooling after that, all at once in bfloat16 on a GPU. The maps between
them have the full size of the images, and are neither written nor read."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels import norm
from equipoise.nets.kernels.activations import Follows
from equipoise.nets.kernels.norm import QuickBatchNorm2d
from equipoise.nets.kernels.pool import QuickMaxPool2d, sides_even
from equipoise.nets.kernels.proof import Case, Kernels, random_values
from equipoise.nets.kernels.replacement import Replacement


def _cases(kernels: ModuleType, device: torch.device) -> Iterator[Case]:
    """The quick batch norm and torch's pooling after it must agree with both at once."""

    def at_once(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        running = norm.fresh_statistics(weight)
        return kernels.PooledBatchNormTraining.apply(x, weight, bias, running, 0.1, 1e-5, "relu"), *running[:2]

    def one_by_one(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        running, narrow = norm.fresh_statistics(weight), x.bfloat16()
        out = norm.KERNELS.module.BatchNormTraining.apply(narrow, weight, bias, running, 0.1, 1e-5, "relu")
        return F.max_pool2d(out, 2), *running[:2]

    plain = random_values((4, 40, 18, 16), device)
    for images in (plain, norm.with_nan(plain)):
        yield Case(at_once, one_by_one, [images, *norm.weight_and_bias(images)])


KERNELS = Kernels("pooled_norm_kernels", _cases, "batch norm and max pooling one after the other, which takes longer")


class PooledBatchNorm2d(QuickBatchNorm2d):
    """A quick batch norm with an activation after it, and `QuickMaxPool2d` after that."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), normalised; where both were done too, (B, C, H / 2, W / 2), marked as `activated` and
        `pooled`."""
        if not (self.trains(images) and sides_even(images)):
            return super().forward(images)
        out = KERNELS.module.PooledBatchNormTraining.apply(images, *self.arguments())
        out.activated = out.pooled = True
        return out


def _before_pooling(net: nn.Module) -> Iterator[nn.Module]:
    """The net's quick batch norms that come before an activation and max pooling in a sequence."""
    kinds = (QuickBatchNorm2d, Follows, QuickMaxPool2d)
    for module in net.modules():
        layers = list(module) if isinstance(module, nn.Sequential) else []
        for triple in zip(layers, layers[1:], layers[2:]):
            if all(map(isinstance, triple, kinds)) and triple[0].activation:
                yield triple[0]


quicken_pooled_norms = Replacement(PooledBatchNorm2d, _before_pooling, KERNELS)
