"""Batch norm, and ReLU with it, that is quick in bfloat16 on a GPU, where torch does without cuDNN for it."""

from __future__ import annotations

from functools import lru_cache, partial
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.quick.proof import proven, random_images

#: shapes on which the kernels prove themselves, of few and of many rows
PROBES = ((4, 16, 8, 8), (8, 40, 24, 24))
#: relative distance that rounding to bfloat16 explains
CLOSE = 0.02


class QuickBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d`, by kernels of its own for bfloat16 images that lie channels-last, in training."""

    relu: bool = False
    """Whether ReLU follows, which then costs nothing."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), normalised, and with ReLU applied where it follows."""
        if not (self.training and images.is_cuda and images.dtype == torch.bfloat16 and _channels_last(images)):
            normal = super().forward(images)
            return F.relu(normal, inplace=True) if self.relu else normal
        kernels = quick_kernels()
        assert kernels is not None and self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        running = (self.running_mean, self.running_var, self.num_batches_tracked)
        options = (self.momentum, self.eps, self.relu)
        return kernels.BatchNormTraining.apply(images, self.weight, self.bias, running, *options)


def _channels_last(images: Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last) and images.shape[0] * images.shape[2:].numel() > 1


@lru_cache(maxsize=1)
def quick_kernels() -> ModuleType | None:
    """The kernels where they work, else None."""
    load = partial(import_module, "equipoise.nets.quick.norm_training")
    return proven(load, prove, "batch norm by torch, which is slower in bfloat16")


def prove(kernels: ModuleType, device: torch.device) -> None:
    """Compare the kernels with torch's batch norm on random values.

    Raises:
        AssertionError: when they differ by more than rounding
    """
    for shape in PROBES:
        _compare(kernels, random_images(shape, device, 0))
        spoilt = random_images(shape, device, 0)
        spoilt[0, 1, 0, 0] = torch.nan
        _compare(kernels, spoilt)


def _compare(kernels: ModuleType, values: Tensor) -> None:
    shape, device = tuple(values.shape), values.device
    given = random_images(shape, device, 1)
    weight, bias = (torch.linspace(first, 1, shape[1], device=device).requires_grad_() for first in (0.5, -1))
    results = []
    for quick in (True, False):
        mean, variance, count = torch.zeros_like(weight), torch.ones_like(weight), torch.zeros((), device=device).long()
        x = (values if quick else values.float()).detach().requires_grad_()
        if quick:
            out = kernels.BatchNormTraining.apply(x, weight, bias, (mean, variance, count), 0.1, 1e-5, True)
        else:
            out = F.relu(F.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5))
        found = torch.autograd.grad(out, (x, weight, bias), given.to(out.dtype))
        results.append([tensor.float() for tensor in (out, *found, mean, variance)])
    for ours, torchs in zip(*results):
        # A value beside zero may pass ReLU on one side alone: compare as a whole.
        same = torch.equal(ours.isnan(), torchs.isnan())
        gap, size = (ours - torchs).nan_to_num().norm(), torchs.nan_to_num().norm()
        assert same and gap <= CLOSE * size, f"the kernels for {shape} give other values than torch"


def quicken_norms(net: nn.Module) -> None:
    """Let the net's batch norms be quick in bfloat16 on a GPU, and ReLUs that follow one directly be part of it.

    Names and values of its state stay as they are.
    """
    if quick_kernels() is None:
        return
    for module in net.modules():
        if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats and module.momentum:
            module.__class__ = QuickBatchNorm2d
    for sequence in [module for module in net.modules() if isinstance(module, nn.Sequential)]:
        for place, (layer, following) in enumerate(pairwise(sequence)):
            if isinstance(layer, QuickBatchNorm2d) and type(following) is nn.ReLU:
                layer.relu = True
                sequence[place + 1] = nn.Identity()
