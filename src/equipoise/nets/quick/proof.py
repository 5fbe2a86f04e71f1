"""Kernels that have to prove themselves on this machine before a net relies on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

import torch

from equipoise.errors import first_line

log = logging.getLogger(__name__)


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
