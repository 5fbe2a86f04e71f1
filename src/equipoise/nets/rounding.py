"""Batches rounded up to powers of two, so that a GPU meets few different shapes.

A GPU looks for kernels anew for each number of images, which takes seconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_rounding_up: ContextVar[bool] = ContextVar("rounding_up", default=False)


@contextmanager
def batches_rounded_up() -> Iterator[None]:
    """Within, nets on a GPU see `rounded_up` batches. For nets in eval mode, without gradients."""
    before = _rounding_up.set(True)
    try:
        yield
    finally:
        _rounding_up.reset(before)


def perhaps_rounded_up(rows: Tensor) -> Tensor:
    """The rows, `rounded_up` where `batches_rounded_up` asks for it."""
    return rounded_up(rows) if _rounding_up.get() else rows


def rounded_up(rows: Tensor) -> Tensor:
    """Rows (n, ...), such as images, with zeros after them, up to a power of two. For nets whose images do not meet."""
    missing = (1 << (len(rows) - 1).bit_length()) - len(rows)
    if not missing:
        return rows
    layout = torch.contiguous_format
    if rows.dim() == 4 and rows.is_contiguous(memory_format=torch.channels_last):
        layout = torch.channels_last
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]).contiguous(memory_format=layout)
