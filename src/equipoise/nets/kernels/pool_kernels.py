# mypy: allow-untyped-defs
"""Max pooling of channels-last images by windows of 2 x 2 in training, as Triton kernels for a GPU.

An image batch (B, C, H, W), H and W even, lies in memory as rows of C channels, one row for each pixel. The forward
pass keeps one byte for each value that comes out: which of the four it was, 0 to 3 in row-major order. The backward
pass needs nothing else, and writes all four gradients at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.nets.kernels.layout import channel_groups, channel_width

#: values that a program gives out (forward) or takes in (backward): 8 for each of its 128 threads
TILE_VALUES = 1024
#: sizes without a special kernel: compiling one takes longer than it saves
SIZES = ["pixels", "across", "groups"]


@triton.jit
def window_places(pixels, across, channels, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """For this program's tile (TILE pixels, WIDTH channels) of what comes out: where it lies, where the first values of
    its windows lie, and which of it there is."""
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    wanted = (places < pixels)[:, None] & (columns < channels)[None, :]
    # pixel (row, column) of the output is number row * across + column; its window starts at pixel (2 row, 2 column)
    # of an image 2 * across wide, which is number 4 * row * across + 2 * column
    corners = 4 * places.to(tl.int64) - 2 * (places % across)
    pooled = places.to(tl.int64)[:, None] * channels + columns[None, :]
    return pooled, corners[:, None] * channels + columns[None, :], wanted


@triton.jit
def window_step(place: tl.constexpr, across, channels):
    """From the first value of a window to that at a place, 0 to 3."""
    return (place // 2 * 2 * across + place % 2) * channels


@triton.jit
def outdoes(value, best):
    """Whether a value takes the place of the best so far: not if it is as good, but always if it is NaN, as torch has
    it."""
    return (value > best) | (value != value)


@triton.jit(do_not_specialize=SIZES)
def _choose(x, out, chosen, pixels, across, groups, TILE: tl.constexpr, WIDTH: tl.constexpr,
            OF: tl.constexpr):  # fmt: skip
    """The largest value of each window, and which it was. `pixels` come out, `across` in each row of an image, of
    `groups` groups `OF` so many channels."""
    channels = groups * OF
    pooled, corners, wanted = window_places(pixels, across, channels, TILE, WIDTH)
    best = tl.load(x + corners, mask=wanted, other=0.0).to(tl.float32)
    choice = tl.zeros((TILE, WIDTH), dtype=tl.int32)
    for place in tl.static_range(1, 4):
        value = tl.load(x + corners + window_step(place, across, channels), mask=wanted, other=0.0).to(tl.float32)
        better = outdoes(value, best)
        best = tl.where(better, value, best)
        choice = tl.where(better, place, choice)
    tl.store(out + pooled, best.to(out.dtype.element_ty), mask=wanted)
    tl.store(chosen + pooled, choice.to(tl.uint8), mask=wanted)


@triton.jit(do_not_specialize=SIZES)
def _hand_back(gradient, chosen, of_x, pixels, across, groups, TILE: tl.constexpr, WIDTH: tl.constexpr,
               OF: tl.constexpr):  # fmt: skip
    """The gradient of x: in each window that of what came out, at the value chosen, and 0 at the others."""
    channels = groups * OF
    pooled, corners, wanted = window_places(pixels, across, channels, TILE, WIDTH)
    given = tl.load(gradient + pooled, mask=wanted, other=0.0)
    choice = tl.load(chosen + pooled, mask=wanted, other=0)
    nothing = tl.zeros((TILE, WIDTH), dtype=gradient.dtype.element_ty)
    for place in tl.static_range(4):
        target = of_x + corners + window_step(place, across, channels)
        tl.store(target, tl.where(choice == place, given, nothing), mask=wanted)


def plan_windows(pooled: Tensor) -> tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]:
    """The grid, the sizes and the constants of a kernel for windows, of which there is one for each pixel of `pooled`
    (B, C, H, W)."""
    batch, channels, down, across = pooled.shape
    width, (groups, group) = channel_width(channels), channel_groups(channels)
    tile, pixels = TILE_VALUES // width, batch * down * across
    grid = triton.cdiv(pixels, tile), triton.cdiv(channels, width)
    return grid, (pixels, across, groups), {"TILE": tile, "WIDTH": width, "OF": group}


def empty_images(like: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Channels-last images without values, as many and with as many channels as others."""
    shape = (*like.shape[:2], height, width)
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


class MaxPoolTraining(torch.autograd.Function):
    """The largest value of each window of 2 x 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x (B, C, H, W), channels last, H and W even."""
        height, width = x.shape[2] // 2, x.shape[3] // 2
        out, chosen = empty_images(x, height, width, x.dtype), empty_images(x, height, width, torch.uint8)
        grid, sizes, constants = plan_windows(out)
        _choose[grid](x, out, chosen, *sizes, **constants)
        ctx.save_for_backward(chosen)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient of x."""
        (chosen,) = ctx.saved_tensors
        (gradient,) = gradients
        if torch.is_grad_enabled():  # somebody wants gradients of this gradient
            return spread_over_windows(gradient, chosen)
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_x = empty_images(gradient, 2 * gradient.shape[2], 2 * gradient.shape[3], gradient.dtype)
        grid, sizes, constants = plan_windows(gradient)
        _hand_back[grid](gradient, chosen, of_x, *sizes, **constants)
        return of_x


def spread_over_windows(gradient: Tensor, chosen: Tensor) -> Tensor:
    """The backward pass in operations that autograd can go through again."""
    nothing = torch.zeros_like(gradient)
    first, second, third, fourth = (torch.where(chosen == place, gradient, nothing) for place in range(4))
    rows = [torch.stack(pair, dim=-1).flatten(-2) for pair in ((first, second), (third, fourth))]  # (B, C, H / 2, W)
    return torch.stack(rows, dim=-2).flatten(2, 3)
