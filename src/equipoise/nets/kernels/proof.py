"""Kernels that prove themselves against torch on this machine before a net relies on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.core.errors import first_line

#: relative distance that rounding to bfloat16 explains
CLOSE = 0.02

log = logging.getLogger(__name__)

#: a computation: the first result is differentiated by all arguments
Way = Callable[..., Tensor | tuple[Tensor, ...]]


class Kernels:
    """A file of Triton kernels in this folder, and the cases in which they must agree with torch.

    Triton comes with torch for CUDA. It may be absent, and its compiler may fail for a GPU.
    """

    def __init__(self, file: str, cases: Callable[[ModuleType, torch.device], Iterable[Case]], otherwise: str) -> None:
        """`cases` of the loaded file on a device; `otherwise` tells users how a net runs without these kernels."""
        self.file = file
        self.cases = cases
        self.otherwise = otherwise
        self.proven: bool | None = None  # not tried yet

    @cached_property
    def module(self) -> ModuleType:
        """The loaded file."""
        return import_module(f"{__package__}.{self.file}")

    def usable(self) -> bool:
        """Whether the kernels load, and pass their proof where there is a GPU. The first call finds out."""
        if self.proven is None:
            self.proven = self._try()
        return self.proven

    def _try(self) -> bool:
        try:
            kernels = self.module
            if torch.cuda.is_available():
                self.prove(kernels, torch.device("cuda"))
        except Exception as problem:  # a compiler for another GPU can raise anything
            log.warning("%s (%s: %s)", self.otherwise, type(problem).__name__, first_line(problem))
            return False
        return True

    def prove(self, kernels: ModuleType, device: torch.device) -> None:
        """Check every case of some loaded kernels.

        Raises:
            AssertionError: when kernels and torch differ
        """
        with torch.enable_grad():
            for case in self.cases(kernels, device):
                case.check()


def assert_alike(ours: Tensor, torchs: Tensor) -> None:
    """Check that two tensors differ by rounding at most, and have the same NaN.

    They are compared as a whole: a value beside zero may pass ReLU on one side alone.
    """
    same = torch.equal(ours.isnan(), torchs.isnan())
    gap, size = (ours.float() - torchs.float()).nan_to_num().norm(), torchs.float().nan_to_num().norm()
    assert same and gap <= CLOSE * size, f"for {tuple(torchs.shape)} the kernels give other values than torch"


def assert_equal(ours: Tensor, torchs: Tensor) -> None:
    """Check that two tensors have equal values."""
    assert torch.equal(ours.float(), torchs.float()), "the kernels give other values than torch"


class Case(NamedTuple):
    """One computation done in two ways. Torch gets the same inputs in float32."""

    ours: Way
    torchs: Way
    inputs: Sequence[Tensor]
    compare: Callable[[Tensor, Tensor], None] = assert_alike

    def check(self) -> None:
        """Compare all results, and the gradients of the first result by the inputs."""
        wide = [tensor.float() for tensor in self.inputs]
        for ours, torchs in zip(_results(self.ours, self.inputs), _results(self.torchs, wide), strict=True):
            self.compare(ours, torchs)


def _results(way: Way, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    found = way(*inputs)
    out, *others = found if isinstance(found, tuple) else (found,)
    gradients = torch.autograd.grad(out, inputs, random_values(tuple(out.shape), out.device, seed=1).to(out.dtype))
    return out, *gradients, *others


def random_values(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> Tensor:
    """Random bfloat16 values, the same on every device; images (B, C, H, W) lie channels last."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)
    return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values
