"""Upsampling to twice the size in bfloat16 on a GPU, where torch's autocast would widen images to float32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels.proof import Case, Kernels, random_values
from equipoise.nets.kernels.replacement import Replacement, exactly, suits


def _cases(kernels: ModuleType, device: torch.device) -> Iterator[Case]:
    yield Case(kernels.Doubling.apply, partial(F.interpolate, scale_factor=2), [random_values((4, 40, 6, 4), device)])


KERNELS = Kernels("doubling_kernels", _cases, "upsampling by torch, which is slower in bfloat16")


class QuickUpsample(nn.Upsample):
    """`nn.Upsample` to twice the size by nearest neighbours, with kernels for images that suit them."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) in, (B, C, 2 H, 2 W) out."""
        if not (suits(images) and images.numel() > 0):
            return super().forward(images)
        return KERNELS.module.Doubling.apply(images)


def _by_two(layer: nn.Upsample) -> bool:
    """Whether a layer doubles both sides by nearest neighbours."""
    return layer.mode == "nearest" and layer.size is None and layer.scale_factor in (2, (2, 2))


quicken_doubling = Replacement(QuickUpsample, exactly(nn.Upsample, _by_two), KERNELS)
