"""The images that our kernels are for, and how kernels prove themselves on this machine before a net relies on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

import torch

from equipoise.core.errors import first_line

#: relative distance that rounding to bfloat16 explains
CLOSE = 0.02

log = logging.getLogger(__name__)


def suits(images: torch.Tensor) -> bool:
    """Whether images (B, C, H, W) are what kernels are for: bfloat16, channels last, on a GPU."""
    quick = images.is_cuda and images.dtype == torch.bfloat16
    return quick and images.is_contiguous(memory_format=torch.channels_last)


def proven(
    load: Callable[[], ModuleType], prove: Callable[[ModuleType, torch.device], None], otherwise: str
) -> ModuleType | None:
    """A module of kernels that passes its proof on the GPU, if there is one; else None, and a warning that says what
    happens `otherwise`: Triton, which comes with torch for CUDA, may be absent, or fail for this GPU."""
    try:
        kernels = load()
        if torch.cuda.is_available():
            with torch.enable_grad():
                prove(kernels, torch.device("cuda"))
    except Exception as problem:  # what a compiler for another GPU raises can be anything
        log.warning("%s (%s: %s)", otherwise, type(problem).__name__, first_line(problem))
        return None
    return kernels


def random_images(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """Random bfloat16 images (B, C, H, W), channels last."""
    random = torch.Generator(device).manual_seed(seed)
    images = torch.randn(shape, generator=random, device=device).bfloat16()
    return images.contiguous(memory_format=torch.channels_last)


def assert_alike(ours: torch.Tensor, torchs: torch.Tensor) -> None:
    """Check that two tensors differ by rounding at most, and have the same NaN.

    They are compared as a whole: a value beside zero may pass ReLU on one side alone.
    """
    same = torch.equal(ours.isnan(), torchs.isnan())
    gap, size = (ours.float() - torchs.float()).nan_to_num().norm(), torchs.float().nan_to_num().norm()
    assert same and gap <= CLOSE * size, f"of {tuple(torchs.shape)} the kernels give other values than torch"
