"""Max pooling by windows of 2 x 2 that is quick in bfloat16 on a GPU, where torch's backward pass fills with zeros
first and then adds."""

from __future__ import annotations

from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels.proof import proven, random_images, suits


class QuickMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` by windows of 2 x 2, by kernels of its own for bfloat16 images that lie channels-last on a GPU,
    in training."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) in, (B, C, H // 2, W // 2) out; those that the batch norm before has pooled stay."""
        if getattr(images, "pooled", False):
            images.pooled = False  # type: ignore[attr-defined] # pooling after this one has its own work to do
            return images
        if not (self.training and suits(images) and sides_even(images)):
            return super().forward(images)
        kernels = quick_pool_kernels()
        assert kernels is not None
        return kernels.MaxPoolTraining.apply(images)


def sides_even(images: Tensor) -> bool:
    """Whether windows of 2 x 2 cover images; where a side is odd, torch leaves its last row or column out."""
    return images.shape[-2] % 2 == 0 and images.shape[-1] % 2 == 0


@lru_cache(maxsize=1)
def quick_pool_kernels() -> ModuleType | None:
    """The kernels where they work, else None."""
    load = partial(import_module, "equipoise.nets.kernels.pool_kernels")
    return proven(load, prove, "max pooling by torch, which is slower in bfloat16")


def prove(kernels: ModuleType, device: torch.device) -> None:
    """Compare the kernels with torch's max pooling on random values, half of them equal.

    Raises:
        AssertionError: when they differ
    """
    images, given = torch.relu(random_images((4, 40, 8, 8), device, 0)), random_images((4, 40, 4, 4), device, 1)
    results = []
    for pool in (kernels.MaxPoolTraining.apply, lambda x: F.max_pool2d(x, 2)):
        x = images.clone().requires_grad_()
        out = pool(x)
        results.append((out, *torch.autograd.grad(out, x, given)))
    for ours, torchs in zip(*results):
        assert torch.equal(ours, torchs), "the kernels give other values than torch"


def quicken_pools(net: nn.Module) -> None:
    """Let the net's max pooling by windows of 2 x 2 side by side be quick in bfloat16 on a GPU."""
    if quick_pool_kernels() is None:
        return
    for module in net.modules():
        if type(module) is nn.MaxPool2d and _by_two(module):
            module.__class__ = QuickMaxPool2d


def _by_two(pool: nn.MaxPool2d) -> bool:
    """Whether a module pools by windows of 2 x 2 side by side, without extras."""
    wanted = ((pool.kernel_size, 2), (pool.stride, 2), (pool.padding, 0), (pool.dilation, 1))
    plain = all(setting in (value, (value, value)) for setting, value in wanted)
    return plain and not pool.return_indices and not pool.ceil_mode
