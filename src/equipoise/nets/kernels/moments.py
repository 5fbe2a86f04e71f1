"""Mean and variance of each channel of a batch, quick in bfloat16 on a GPU, where torch reads images several times."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from equipoise.nets.kernels.proof import Case, Kernels, Way, random_values
from equipoise.nets.kernels.replacement import suits


def _cases(kernels: ModuleType, device: torch.device) -> Iterator[Case]:
    weights = torch.linspace(-1, 1, 40, device=device)

    def by(moments: Way) -> Way:
        def losses(images: Tensor) -> tuple[Tensor, ...]:
            mean, variance = moments(images)
            return weights.to(mean) * (mean + variance**2), mean, variance

        return losses

    yield Case(by(kernels.Moments.apply), by(_by_torch), [random_values((8, 40, 24, 24), device) + 2])


KERNELS = Kernels("moments_kernels", _cases, "means and variances by torch, which is slower in bfloat16")


def channel_moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C,) over a batch (B, C, H, W), in float32 where images are less precise."""
    if suits(images) and images.numel() > 0 and KERNELS.usable():
        return KERNELS.module.Moments.apply(images)
    return _by_torch(images)


def _by_torch(images: Tensor) -> tuple[Tensor, Tensor]:
    wide = images.float() if images.dtype in (torch.bfloat16, torch.float16) else images
    variance, mean = torch.var_mean(wide, dim=(0, 2, 3), correction=0)
    return mean, variance
