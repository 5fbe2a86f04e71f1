# mypy: allow-untyped-defs
# ruff: noqa: RUF005 - Triton can concatenate tuples, but not unpack them
"""Depthwise convolutions of channels-last images, as Triton kernels for a GPU.

An image batch (B, C, H, W) lies in memory as rows of C channels, one row for each pixel; the weight (C, 1, K, K) is
read as K x K taps of C channels each. Sums are taken in float32 and in a fixed order: no atomics, so that repeats give
the same bits. Sizes are arguments, so that a kernel is compiled once for each K and stride and serves every shape.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from equipoise.nets.kernels.layout import channel_groups

#: channels of a program, and how many strips or blocks of pixels: 8 values for each of its 128 threads
WIDTH, TILE = 32, 32
#: pixels side by side that a thread makes at once, since they share most of their inputs
STRIP = 4
#: programs that a large GPU can run at a time
PROGRAMS = 512
#: partial sums of a weight's gradient, and channels of them, that a program adds up at a time
TOTALS_ROWS, TOTALS_WIDTH = 256, 16
#: sizes without a special kernel: compiling one takes longer than it saves
SIZES = [
    "strips", "blocks", "stretch", "stretches", "lines", "height", "width", "down", "across", "high", "wide",
    "top", "left", "first", "sense", "groups", "entries",
]  # fmt: skip


@triton.jit
def _places(numbers, down, across):
    """Where things numbered in row-major order lie: image, row, column; `across` in a row and `down` rows an image."""
    lines = numbers // across
    return lines // down, lines % down, numbers % across


@triton.jit
def _line(images, image, row, column, columns, height, width, channels):
    """Pointers (TILE, WIDTH) to pixels, of which some may lie outside of their image."""
    pixels = (image * height + row).to(tl.int64) * width + column
    return images + pixels[:, None] * channels + columns[None, :]


@triton.jit
def _read(line, step, there, column, width, some, channels):
    """Values (TILE, WIDTH) of the pixels `step` further on in their lines, 0 where there is no such pixel."""
    inside = there & (column + step >= 0) & (column + step < width)
    return tl.load(line + step * channels, mask=inside[:, None] & some[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def convolve(x, taps, out, strips, height, width, down, across, top, left, first, sense, groups, K: tl.constexpr,
             STRIDE: tl.constexpr, STRIP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
             OF: tl.constexpr):  # fmt: skip
    """Images `down` times `across` from images `height` times `width` after `top` and `left` lines of zeros, of
    `groups` groups `OF` so many channels. The first tap is number `first`, and `sense` says where to go from there."""
    channels = groups * OF
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    some = columns < channels
    numbers = tl.program_id(0) * TILE + tl.arange(0, TILE)
    image, place, strip = _places(numbers, down, tl.cdiv(across, STRIP))
    row, column = place * STRIDE - top, strip * STRIP * STRIDE - left
    sums = (tl.zeros((TILE, WIDTH), dtype=tl.float32),) * STRIP
    for tap_row in range(K):
        there = (numbers < strips) & (row + tap_row >= 0) & (row + tap_row < height)
        line = _line(x, image, row + tap_row, column, columns, height, width, channels)
        for step in tl.static_range((STRIP - 1) * STRIDE + K):
            values = _read(line, step, there, column, width, some, channels)
            for pixel in tl.static_range(STRIP):
                if step - pixel * STRIDE >= 0 and step - pixel * STRIDE < K:
                    number = first + sense * (tap_row * K + step - pixel * STRIDE)
                    tap = tl.load(taps + number * channels + columns, mask=some, other=0.0).to(tl.float32)
                    made = sums[pixel] + values * tap[None, :]
                    sums = sums[:pixel] + (made,) + sums[pixel + 1 :]
    target = _line(out, image, place, strip * STRIP, columns, down, across, channels)
    for pixel in tl.static_range(STRIP):
        wanted = (numbers < strips) & (strip * STRIP + pixel < across)
        values = sums[pixel].to(out.dtype.element_ty)
        tl.store(target + pixel * channels, values, mask=wanted[:, None] & some[None, :])


@triton.jit(do_not_specialize=SIZES)
def spread(given, taps, of_x, blocks, height, width, down, across, high, wide, top, left, groups, K: tl.constexpr,
           TILE: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr):  # fmt: skip
    """The gradient of x for stride 2, by blocks of 2 x 2 pixels, `high` times `wide` blocks an image: the pixels of a
    block have no tap in common, but are made from the same gradients `given`."""
    channels = groups * OF
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    some = columns < channels
    numbers = tl.program_id(0) * TILE + tl.arange(0, TILE)
    image, row, column = _places(numbers, high, wide)
    row, column = row + top // 2, column + left // 2  # of the gradient that the block's first tap belongs to
    sums = (tl.zeros((TILE, WIDTH), dtype=tl.float32),) * 4
    for above in tl.static_range((K + 1) // 2):
        there = (numbers < blocks) & (row - above >= 0) & (row - above < down)
        line = _line(given, image, row - above, column, columns, down, across, channels)
        for before in tl.static_range((K + 1) // 2):
            values = _read(line, -before, there, column, across, some, channels)
            for pixel in tl.static_range(4):
                if 2 * above + pixel // 2 < K and 2 * before + pixel % 2 < K:
                    number = (2 * above + pixel // 2) * K + 2 * before + pixel % 2
                    tap = tl.load(taps + number * channels + columns, mask=some, other=0.0).to(tl.float32)
                    made = sums[pixel] + values * tap[None, :]
                    sums = sums[:pixel] + (made,) + sums[pixel + 1 :]
    row, column = 2 * row - top, 2 * column - left
    for pixel in tl.static_range(4):
        y, x = row + pixel // 2, column + pixel % 2
        wanted = (numbers < blocks) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        target = _line(of_x, image, y, x, columns, height, width, channels)
        tl.store(target, sums[pixel].to(of_x.dtype.element_ty), mask=wanted[:, None] & some[None, :])


@triton.jit(do_not_specialize=SIZES)
def tap_sums(x, given, partial, strips, stretch, lines, height, width, down, across, top, left, groups, K: tl.constexpr,
             STRIDE: tl.constexpr, STRIP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
             OF: tl.constexpr):  # fmt: skip
    """Partial sums (stretches, K, K, C) of the weight's gradient, over stretches of strips of what came out; a program
    takes `lines` rows of taps, one after the other, which leaves its pixels in the cache."""
    channels = groups * OF
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    some = columns < channels
    begin = tl.program_id(0) * stretch
    nothing = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    for tap_row in range(tl.program_id(2) * lines, tl.minimum(tl.program_id(2) * lines + lines, K)):
        sums = (nothing,) * K
        for start in range(begin, tl.minimum(begin + stretch, strips), TILE):
            numbers = start + tl.arange(0, TILE)
            image, place, strip = _places(numbers, down, tl.cdiv(across, STRIP))
            row, column = place * STRIDE - top + tap_row, strip * STRIP * STRIDE - left
            line = _line(given, image, place, strip * STRIP, columns, down, across, channels)
            slopes = (nothing,) * STRIP
            for pixel in tl.static_range(STRIP):
                slope = _read(line, pixel, numbers < strips, strip * STRIP, across, some, channels)
                slopes = slopes[:pixel] + (slope,) + slopes[pixel + 1 :]
            there = (numbers < strips) & (row >= 0) & (row < height)
            line = _line(x, image, row, column, columns, height, width, channels)
            for step in tl.static_range((STRIP - 1) * STRIDE + K):
                values = _read(line, step, there, column, width, some, channels)
                for tap in tl.static_range(K):
                    if (step - tap) % STRIDE == 0 and step >= tap and step - tap < STRIP * STRIDE:
                        made = sums[tap] + values * slopes[(step - tap) // STRIDE]
                        sums = sums[:tap] + (made,) + sums[tap + 1 :]
        target = partial + ((tl.program_id(0) * K + tap_row) * K).to(tl.int64) * channels + columns
        for tap in tl.static_range(K):
            tl.store(target + tap * channels, tl.sum(sums[tap], axis=0), mask=some)


@triton.jit(do_not_specialize=SIZES)
def tap_totals(partial, of_taps, stretches, entries, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The weight's gradient: partial sums (stretches, entries), added up."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, stretches, ROWS):
        rows = start + tl.arange(0, ROWS)
        wanted = (rows < stretches)[:, None] & (columns < entries)[None, :]
        total += tl.load(partial + rows.to(tl.int64)[:, None] * entries + columns[None, :], mask=wanted, other=0.0)
    tl.store(of_taps + columns, tl.sum(total, axis=0).to(of_taps.dtype.element_ty), mask=columns < entries)


def by_taps(weight: Tensor) -> Tensor:
    """A weight (C, 1, K, K) in the kernels' layout (K, K, C), one tap after the other in memory; a view if it lies so
    already."""
    return weight.detach().squeeze(1).permute(1, 2, 0).contiguous()


def _empty(like: Tensor, height: int, width: int) -> Tensor:
    """Channels-last images without values, as many and with as many channels as others."""
    shape = (*like.shape[:2], height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _channels(images: Tensor) -> tuple[int, int, dict[str, int]]:
    """Programs for the channels of images, their number of groups, and the constants of kernels."""
    groups, group = channel_groups(images.shape[1])
    return triton.cdiv(images.shape[1], WIDTH), groups, {"TILE": TILE, "WIDTH": WIDTH, "OF": group}


def _strips(images: Tensor) -> int:
    """How many strips images are made of."""
    return images.shape[0] * images.shape[2] * triton.cdiv(images.shape[3], STRIP)


def _convolved(x: Tensor, taps: Tensor, out: Tensor, stride: int, top: int, left: int, turned: bool) -> Tensor:
    """`out`, filled with x convolved by taps (K, K, C), or by the same ones `turned` around."""
    size, strips = len(taps), _strips(out)
    programs, groups, constants = _channels(x)
    order = (size * size - 1, -1) if turned else (0, 1)
    sizes = (strips, *x.shape[2:], *out.shape[2:], top, left, *order, groups)
    convolve[triton.cdiv(strips, TILE), programs](x, taps, out, *sizes, K=size, STRIDE=stride, STRIP=STRIP, **constants)
    return out


def _gradient_of_x(given: Tensor, taps: Tensor, x: Tensor, stride: int, top: int, left: int) -> Tensor:
    """The gradient of x."""
    size, of_x = len(taps), torch.empty_like(x)
    if stride == 1:
        return _convolved(given, taps, of_x, 1, size - 1 - top, size - 1 - left, turned=True)
    programs, groups, constants = _channels(x)
    height, width = x.shape[2:]
    high, wide = (top + height - 1) // 2 - top // 2 + 1, (left + width - 1) // 2 - left // 2 + 1
    blocks = len(x) * high * wide
    sizes = (blocks, height, width, *given.shape[2:], high, wide, top, left, groups)
    spread[triton.cdiv(blocks, TILE), programs](given, taps, of_x, *sizes, K=size, **constants)
    return of_x


def _gradient_of_weight(given: Tensor, x: Tensor, weight: Tensor, stride: int, top: int, left: int) -> Tensor:
    """The gradient of the weight, tap by tap in memory."""
    size, strips = weight.shape[-1], _strips(given)
    programs, groups, constants = _channels(x)
    tiles = triton.cdiv(strips, TILE)
    parts = 1 if tiles * programs >= PROGRAMS else size  # of the rows of taps: where pixels are few, one each
    stretch = triton.cdiv(tiles, min(tiles, triton.cdiv(PROGRAMS, programs * parts)))
    stretches = triton.cdiv(tiles, stretch)
    partial = x.new_empty((stretches, size, size, x.shape[1]), dtype=torch.float32)
    sizes = (strips, stretch * TILE, size // parts, *x.shape[2:], *given.shape[2:], top, left, groups)
    tap_sums[stretches, programs, parts](x, given, partial, *sizes, K=size, STRIDE=stride, STRIP=STRIP, **constants)
    of_taps = weight.new_empty(partial.shape[1:])
    entries = of_taps.numel()
    tap_totals[(triton.cdiv(entries, TOTALS_WIDTH),)](
        partial, of_taps, stretches, entries, ROWS=TOTALS_ROWS, WIDTH=TOTALS_WIDTH
    )
    return of_taps.permute(2, 0, 1).unsqueeze(1)


class DepthwiseConvolution(torch.autograd.Function):
    """Each channel convolved by a separate filter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, margins: tuple[int, int, int, int]) -> Tensor:
        """x (B, C, H, W), channels last; weight (C, 1, K, K), K odd; stride 1 or 2; lines of zeros to the left, to the
        right, on top and at the bottom of each image."""
        left, right, top, bottom = margins
        taps = by_taps(weight)
        height, width = (
            (side + more - len(taps)) // stride + 1 for side, more in zip(x.shape[2:], (top + bottom, left + right))
        )
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.margins = stride, margins
        return _convolved(x, taps, _empty(x, height, width), stride, top, left, turned=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and weight, where somebody needs them."""
        x, weight = ctx.saved_tensors
        (given,) = gradients
        needed = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # somebody wants gradients of these gradients
            return *_differentiable_backward(given, x, weight, ctx.stride, ctx.margins, needed), None, None
        given = given.contiguous(memory_format=torch.channels_last)
        left, _, top, _ = ctx.margins
        of_x = _gradient_of_x(given, by_taps(weight), x, ctx.stride, top, left) if needed[0] else None
        of_weight = _gradient_of_weight(given, x, weight, ctx.stride, top, left) if needed[1] else None
        return of_x, of_weight, None, None


def _differentiable_backward(
    given: Tensor, x: Tensor, weight: Tensor, stride: int, margins: tuple[int, int, int, int], needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The backward pass in operations that autograd can go through again."""
    of_padded, of_weight, _ = torch.ops.aten.convolution_backward(
        given, F.pad(x, margins), weight, None, (stride, stride), (0, 0), (1, 1), False, (0, 0), len(weight),
        (*needed, False),
    )  # fmt: skip
    return F.pad(of_padded, [-margin for margin in margins]) if needed[0] else None, of_weight
