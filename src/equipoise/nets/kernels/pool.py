"""Max pooling by windows of 2 x 2 in bfloat16 on a GPU, where torch's backward pass fills with zeros first and then
adds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels.proof import Case, Kernels, assert_equal, random_values
from equipoise.nets.kernels.replacement import Replacement, exactly, suits


def _cases(kernels: ModuleType, device: torch.device) -> Iterator[Case]:
    images = torch.relu(random_values((4, 40, 8, 8), device))  # half of the values are equal
    yield Case(kernels.MaxPoolTraining.apply, partial(F.max_pool2d, kernel_size=2), [images], assert_equal)


KERNELS = Kernels("pool_kernels", _cases, "max pooling by torch, which is slower in bfloat16")


class QuickMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` by windows of 2 x 2, with kernels for images that suit them, in training."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) in, (B, C, H // 2, W // 2) out. Images that the batch norm before has pooled stay."""
        if getattr(images, "pooled", False):
            images.pooled = False  # type: ignore[attr-defined] # a pooling layer after this one must pool
            return images
        if not (self.training and suits(images) and sides_even(images)):
            return super().forward(images)
        return KERNELS.module.MaxPoolTraining.apply(images)


def sides_even(images: Tensor) -> bool:
    """Whether windows of 2 x 2 cover images; where a side is odd, torch leaves its last row or column out."""
    return images.shape[-2] % 2 == 0 and images.shape[-1] % 2 == 0


def _by_two(pool: nn.MaxPool2d) -> bool:
    """Whether a layer pools by windows of 2 x 2 side by side, without extras."""
    wanted = ((pool.kernel_size, 2), (pool.stride, 2), (pool.padding, 0), (pool.dilation, 1))
    plain = all(setting in (value, (value, value)) for setting, value in wanted)
    return plain and not pool.return_indices and not pool.ceil_mode


quicken_pools = Replacement(QuickMaxPool2d, exactly(nn.MaxPool2d, _by_two), KERNELS)
