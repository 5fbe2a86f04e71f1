"""Batch norm, and ReLU with it, that is quick in bfloat16 on a GPU, where torch does without cuDNN for it."""

from __future__ import annotations

import logging
from functools import lru_cache
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger(__name__)


class QuickBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d`, by kernels of its own for bfloat16 images that lie channels-last, in training."""

    relu: bool = False
    """Whether ReLU follows, which then costs nothing."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), normalised, and with ReLU applied where it follows."""
        if not (self.training and images.dtype == torch.bfloat16 and _channels_last(images)):
            normal = super().forward(images)
            return F.relu(normal, inplace=True) if self.relu else normal
        kernels = quick_kernels()
        assert kernels is not None and self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        self.num_batches_tracked.add_(1)
        running = (self.running_mean, self.running_var)
        options = (self.momentum, self.eps, self.relu)
        return kernels.BatchNormTraining.apply(images, self.weight, self.bias, running, *options)


def _channels_last(images: Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last) and images.shape[0] * images.shape[2:].numel() > 1


@lru_cache(maxsize=1)
def quick_kernels() -> ModuleType | None:
    """The kernels, or None where Triton, which comes with torch for CUDA, is not there."""
    try:
        from equipoise.nets import norm_kernels as kernels
    except ImportError as problem:
        log.warning("batch norm by torch, which is slower in bfloat16: %s", problem)
        return None
    return kernels


def quicken(net: nn.Module) -> None:
    """Let the net's batch norms be quick in bfloat16 on a GPU, and ReLUs that follow one directly be part of it.

    Names and values of its state stay as they are.
    """
    if quick_kernels() is None:
        return
    for module in net.modules():
        if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats and module.momentum:
            module.__class__ = QuickBatchNorm2d
    for sequence in [module for module in net.modules() if isinstance(module, nn.Sequential)]:
        for place, (layer, following) in enumerate(pairwise(list(sequence.children()))):
            if isinstance(layer, QuickBatchNorm2d) and type(following) is nn.ReLU:
                layer.relu = True
                sequence[place + 1] = nn.Identity()
