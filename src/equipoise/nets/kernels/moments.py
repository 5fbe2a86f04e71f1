"""Mean and variance of each channel of a batch, quick in bfloat16 on a GPU, where torch reads images several times."""

from __future__ import annotations

from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from equipoise.nets.kernels.proof import assert_alike, proven, random_images, suits


def channel_moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C,) over a batch (B, C, H, W), in float32 where images are less precise."""
    kernels = quick_moments_kernels() if suits(images) and images.numel() > 0 else None
    return _by_torch(images) if kernels is None else kernels.Moments.apply(images)


def _by_torch(images: Tensor) -> tuple[Tensor, Tensor]:
    wide = images.float() if images.dtype in (torch.bfloat16, torch.float16) else images
    variance, mean = torch.var_mean(wide, dim=(0, 2, 3), correction=0)
    return mean, variance


@lru_cache(maxsize=1)
def quick_moments_kernels() -> ModuleType | None:
    """The kernels where they work, else None."""
    load = partial(import_module, "equipoise.nets.kernels.moments_kernels")
    return proven(load, prove, "means and variances by torch, which is slower in bfloat16")


def prove(kernels: ModuleType, device: torch.device) -> None:
    """Compare the kernels with torch's mean and variance on random values.

    Raises:
        AssertionError: when they differ by more than rounding
    """
    images = random_images((8, 40, 24, 24), device, 0) + 2
    weights = torch.linspace(-1, 1, 40, device=device)
    results = []
    for moments in (kernels.Moments.apply, _by_torch):
        x = images.clone().requires_grad_()
        mean, variance = moments(x)
        results.append((mean, variance, *torch.autograd.grad((weights * (mean + variance**2)).sum(), x)))
    for ours, torchs in zip(*results):
        assert_alike(ours, torchs)
