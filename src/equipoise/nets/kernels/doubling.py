"""Upsampling to twice the size that is quick in bfloat16 on a GPU, where torch's autocast widens to float32 for it."""

from __future__ import annotations

from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels.proof import assert_alike, proven, random_images, suits


class QuickUpsample(nn.Upsample):
    """`nn.Upsample` to twice the size by nearest neighbours, by kernels of its own for bfloat16 images that lie
    channels-last on a GPU."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) in, (B, C, 2 H, 2 W) out."""
        if not (suits(images) and images.numel() > 0):
            return super().forward(images)
        kernels = quick_doubling_kernels()
        assert kernels is not None
        return kernels.Doubling.apply(images)


@lru_cache(maxsize=1)
def quick_doubling_kernels() -> ModuleType | None:
    """The kernels where they work, else None."""
    load = partial(import_module, "equipoise.nets.kernels.doubling_kernels")
    return proven(load, prove, "upsampling by torch, which is slower in bfloat16")


def prove(kernels: ModuleType, device: torch.device) -> None:
    """Compare the kernels with torch's upsampling on random values.

    Raises:
        AssertionError: when they differ by more than rounding
    """
    images, given = random_images((4, 40, 6, 4), device, 0), random_images((4, 40, 12, 8), device, 1)
    results = []
    for double in (kernels.Doubling.apply, lambda x: F.interpolate(x.float(), scale_factor=2)):
        x = images.clone().requires_grad_()
        out = double(x)
        results.append((out, *torch.autograd.grad(out, x, given.to(out.dtype))))
    for ours, torchs in zip(*results):
        assert_alike(ours, torchs)


def quicken_doubling(net: nn.Module) -> None:
    """Let the net's upsampling to twice the size be quick in bfloat16 on a GPU."""
    found = [module for module in net.modules() if type(module) is nn.Upsample and _by_two(module)]
    if found and quick_doubling_kernels() is not None:
        for module in found:
            module.__class__ = QuickUpsample


def _by_two(layer: nn.Upsample) -> bool:
    """Whether a module doubles both sides by nearest neighbours."""
    return layer.mode == "nearest" and layer.size is None and layer.scale_factor in (2, (2, 2))
