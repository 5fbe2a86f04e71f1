# mypy: allow-untyped-defs
"""Channels-last images at twice their height and width, each value four times, as Triton kernels for a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from equipoise.nets.kernels.pool_kernels import SIZES, empty_images, plan_windows, window_places, window_step


@triton.jit(do_not_specialize=SIZES)
def _spread(x, out, pixels, across, groups, TILE: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr):
    """Each value of x at all four places of its window. `pixels` come in, `across` in each row of an image, of
    `groups` groups `OF` so many channels."""
    channels = groups * OF
    places, corners, wanted = window_places(pixels, across, channels, TILE, WIDTH)
    values = tl.load(x + places, mask=wanted, other=0.0)
    for place in tl.static_range(4):
        tl.store(out + corners + window_step(place, across, channels), values, mask=wanted)


@triton.jit(do_not_specialize=SIZES)
def _add_up(given, of_x, pixels, across, groups, TILE: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr):
    """The gradient of x: that of all four places, added up."""
    channels = groups * OF
    places, corners, wanted = window_places(pixels, across, channels, TILE, WIDTH)
    total = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    for place in tl.static_range(4):
        offsets = corners + window_step(place, across, channels)
        total += tl.load(given + offsets, mask=wanted, other=0.0).to(tl.float32)
    tl.store(of_x + places, total.to(of_x.dtype.element_ty), mask=wanted)


class Doubling(torch.autograd.Function):
    """Images of twice the height and width."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x (B, C, H, W), channels last; (B, C, 2 H, 2 W)."""
        out = empty_images(x, 2 * x.shape[2], 2 * x.shape[3], x.dtype)
        grid, sizes, constants = plan_windows(x)
        _spread[grid](x, out, *sizes, **constants)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient of x."""
        (given,) = gradients
        if torch.is_grad_enabled():  # somebody wants gradients of this gradient
            return 4 * F.avg_pool2d(given, 2)
        given = given.contiguous(memory_format=torch.channels_last)
        of_x = empty_images(given, given.shape[2] // 2, given.shape[3] // 2, given.dtype)
        grid, sizes, constants = plan_windows(of_x)
        _add_up[grid](given, of_x, *sizes, **constants)
        return of_x
