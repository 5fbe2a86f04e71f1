"""Batch norm, and the activation after it, quick in bfloat16 on a GPU, where torch does without cuDNN for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.quick.proof import proven, random_images

#: shapes of few and of many rows, and activations, with which the kernels prove themselves
PROBES = (((4, 16, 8, 8), "relu"), ((8, 40, 24, 24), "relu"), ((4, 16, 8, 8), "silu"), ((4, 16, 8, 8), "relu6"))
#: relative distance that rounding to bfloat16 explains
CLOSE = 0.02


class QuickBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d`, by kernels of its own for bfloat16 images that lie channels-last on a GPU, in training."""

    activation: str = ""
    """What follows directly and may be done at once, which then costs nothing."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), normalised; where the activation was done too, marked as `activated`."""
        if not (self.training and images.is_cuda and images.dtype == torch.bfloat16 and _channels_last(images)):
            return super().forward(images)
        kernels = quick_kernels()
        assert kernels is not None and self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        running = (self.running_mean, self.running_var, self.num_batches_tracked)
        options = (self.momentum, self.eps, self.activation)
        out = kernels.BatchNormTraining.apply(images, self.weight, self.bias, running, *options)
        out.activated = bool(self.activation)
        return out


class _Follows(nn.Module):
    """An activation that leaves alone what the batch norm before it has activated."""

    def forward(self, values: Tensor) -> Tensor:
        """Values of any shape."""
        return values if getattr(values, "activated", False) else super().forward(values)


class QuickReLU(_Follows, nn.ReLU):
    """ReLU."""


class QuickReLU6(_Follows, nn.ReLU6):
    """ReLU, up to 6."""


class QuickSiLU(_Follows, nn.SiLU):
    """SiLU, also called swish."""


ACTIVATIONS: tuple[tuple[str, type[nn.Module], type[nn.Module]], ...] = (
    ("relu", nn.ReLU, QuickReLU),
    ("relu6", nn.ReLU6, QuickReLU6),
    ("silu", nn.SiLU, QuickSiLU),
)
#: what MONAI's and the lite package's blocks call an activation, and the norms that it follows directly
BLOCKS = {"_swish": ("_bn0", "_bn1"), "act": ("bn1",)}


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
    for shape, activation in PROBES:
        _compare(kernels, random_images(shape, device, 0), activation)
    spoilt = random_images(PROBES[0][0], device, 0)
    spoilt[0, 1, 0, 0] = torch.nan
    _compare(kernels, spoilt, PROBES[0][1])


def _compare(kernels: ModuleType, values: Tensor, activation: str) -> None:
    shape, device = tuple(values.shape), values.device
    given = random_images(shape, device, 1)
    weight, bias = (torch.linspace(first, 1, shape[1], device=device).requires_grad_() for first in (0.5, -1))
    results = []
    for quick in (True, False):
        mean, variance, count = torch.zeros_like(weight), torch.ones_like(weight), torch.zeros((), device=device).long()
        x = (values if quick else values.float()).detach().requires_grad_()
        if quick:
            out = kernels.BatchNormTraining.apply(x, weight, bias, (mean, variance, count), 0.1, 1e-5, activation)
        else:
            out = getattr(F, activation)(F.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5))
        found = torch.autograd.grad(out, (x, weight, bias), given.to(out.dtype))
        results.append([tensor.float() for tensor in (out, *found, mean, variance)])
    for ours, torchs in zip(*results):
        # A value beside zero may pass ReLU on one side alone: compare as a whole.
        same = torch.equal(ours.isnan(), torchs.isnan())
        gap, size = (ours - torchs).nan_to_num().norm(), torchs.nan_to_num().norm()
        assert same and gap <= CLOSE * size, f"the kernels for {shape} give other values than torch"


def quicken_norms(net: nn.Module) -> None:
    """Let the net's batch norms be quick in bfloat16 on a GPU, and activations that follow one directly be part of it.

    Names and values of its state stay as they are.
    """
    if quick_kernels() is None:
        return
    for module in net.modules():
        if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats and module.momentum:
            module.__class__ = QuickBatchNorm2d
    for layer, following in list(_neighbours(net)):
        for name, usual, quick in ACTIVATIONS:
            if isinstance(layer, QuickBatchNorm2d) and type(following) in (usual, quick):
                layer.activation, following.__class__ = name, quick


def _neighbours(net: nn.Module) -> Iterator[tuple[nn.Module | None, nn.Module]]:
    """Layers, and what follows them directly: in a sequence, or in a block of which that is known."""
    for module in net.modules():
        if isinstance(module, nn.Sequential):
            yield from pairwise(module)
        for activation, norms in BLOCKS.items():
            if hasattr(module, activation):
                yield from ((getattr(module, norm, None), getattr(module, activation)) for norm in norms)
