# mypy: allow-untyped-defs
"""Batch norm of channels-last images, with or without an activation after it, as Triton kernels for a GPU: in training,
and by statistics that stand still.

An image batch (B, C, H, W) lies in memory as rows of C channels. Sums over rows are taken in float32 and in a fixed
order: no atomics, so that repeats give the same bits. Of many rows they are taken in two stages, first over stretches
of rows and then over stretches; few rows are left to one kernel, since it is launches that small maps wait for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from equipoise.nets.kernels.activations import LEAK

#: sizes without a special kernel: compiling one takes longer than it saves
SIZES = ["rows", "stretch", "stretches", "channels", "groups"]
#: activations, by their places in `ACTIVATIONS`; 0 is none
RELU, RELU6, SILU, LEAKY_RELU = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
SLOPE = tl.constexpr(LEAK)


# ---- what one program does with its rows and columns -------------------------------------------------------


@triton.jit
def tile(start, rows, columns, channels, TILE: tl.constexpr):
    """Offsets (TILE, WIDTH) of the values of some rows, and which of them there are."""
    places = start + tl.arange(0, TILE)
    wanted = (places < rows)[:, None] & (columns < channels)[None, :]
    return places[:, None].to(tl.int64) * channels + columns[None, :], wanted


@triton.jit
def of_channels(values, columns, channels):
    """Numbers (WIDTH,) of some channels."""
    return tl.load(values + columns, mask=columns < channels, other=0.0).to(tl.float32)


@triton.jit
def known_of(mean, inverse, weight, bias, columns, channels):
    """Mean, inverse deviation, weight and bias (WIDTH,) of some channels."""
    centre, scale = of_channels(mean, columns, channels), of_channels(inverse, columns, channels)
    return centre, scale, of_channels(weight, columns, channels), of_channels(bias, columns, channels)


@triton.jit
def _sum_values(x, begin, end, rows, columns, channels, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Sums (WIDTH,) over rows of x less the batch's first row, and of that squared."""
    origin = of_channels(x, columns, channels)
    first = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    second = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    for start in range(begin, end, TILE):
        offsets, wanted = tile(start, rows, columns, channels, TILE)
        values = tl.load(x + offsets, mask=wanted, other=0.0).to(tl.float32) - origin[None, :]
        values = tl.where(wanted, values, 0.0)
        first += values
        second += values * values
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def normalised(values, centre, scale):
    """Values (TILE, WIDTH) by mean and inverse deviation (WIDTH,), before weight and bias."""
    return (values - centre[None, :]) * scale[None, :]


@triton.jit
def activated(values, ACT: tl.constexpr):
    """What the activation makes of values."""
    if ACT == RELU:
        values = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ACT == RELU6:
        values = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
        values = tl.minimum(values, 6.0, propagate_nan=tl.PropagateNan.ALL)
    if ACT == SILU:
        values = values * tl.sigmoid(values)
    if ACT == LEAKY_RELU:
        values = tl.where(values <= 0, SLOPE * values, values)
    return values


@triton.jit
def before_activation(gradient, values, ACT: tl.constexpr):
    """The gradient (TILE, WIDTH) of values that batch norm gave, from that of what the activation made of them."""
    if ACT == RELU:
        gradient = tl.where(values <= 0, 0.0, gradient)
    if ACT == RELU6:
        gradient = tl.where((values <= 0) | (values >= 6), 0.0, gradient)
    if ACT == SILU:
        share = tl.sigmoid(values)
        gradient = gradient * share * (1 + values * (1 - share))
    if ACT == LEAKY_RELU:
        gradient = tl.where(values <= 0, SLOPE * gradient, gradient)
    return gradient


@triton.jit
def before_norm(gradient, normal, scale, gain, of_weight, of_bias, rows):
    """The gradient (TILE, WIDTH) of x from that of what batch norm gave, and the gradients (WIDTH,) of weight and
    bias."""
    return (gradient - (of_bias / rows)[None, :] - normal * (of_weight / rows)[None, :]) * (gain * scale)[None, :]


@triton.jit
def _sum_gradients(x, given, centre, scale, gain, shift, begin, end, rows, columns, channels, ACT: tl.constexpr,
                   TILE: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Sums (WIDTH,) over rows of the gradient, and of that times the normalised x."""
    first = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    second = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    for start in range(begin, end, TILE):
        offsets, wanted = tile(start, rows, columns, channels, TILE)
        values = tl.load(x + offsets, mask=wanted, other=0.0).to(tl.float32)
        normal = normalised(values, centre, scale)
        gradient = tl.load(given + offsets, mask=wanted, other=0.0).to(tl.float32)
        gradient = before_activation(gradient, normal * gain[None, :] + shift[None, :], ACT)
        first += gradient
        second += gradient * normal
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def centre_and_variance(x, first, second, rows, columns, channels):
    """Mean and biased variance (WIDTH,) from the sums of `_sum_values` over all rows."""
    first, second = first / rows, second / rows
    variance = tl.maximum(second - first * first, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return of_channels(x, columns, channels) + first, variance


@triton.jit
def _note_statistics(x, first, second, mean, inverse, running_mean, running_variance, rows, columns, channels, momentum,
                     epsilon):  # fmt: skip
    """Mean and inverse deviation (WIDTH,) from sums over rows, written down; the running statistics move."""
    inside = columns < channels
    centre, variance = centre_and_variance(x, first, second, rows, columns, channels)
    scale = 1.0 / tl.sqrt(variance + epsilon)
    tl.store(mean + columns, centre, mask=inside)
    tl.store(inverse + columns, scale, mask=inside)
    unbiased = variance * (rows / (rows - 1.0))
    old = of_channels(running_mean, columns, channels)
    tl.store(running_mean + columns, old + momentum * (centre - old), mask=inside)
    old = of_channels(running_variance, columns, channels)
    tl.store(running_variance + columns, old + momentum * (unbiased - old), mask=inside)
    return centre, scale


@triton.jit
def _write_normal(x, out, centre, scale, gain, shift, begin, end, rows, columns, channels, ACT: tl.constexpr,
                  TILE: tl.constexpr):  # fmt: skip
    """x, normalised."""
    for start in range(begin, end, TILE):
        offsets, wanted = tile(start, rows, columns, channels, TILE)
        values = tl.load(x + offsets, mask=wanted, other=0.0).to(tl.float32)
        result = activated(normalised(values, centre, scale) * gain[None, :] + shift[None, :], ACT)
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _write_gradient(x, given, out, centre, scale, gain, shift, of_weight, of_bias, begin, end, rows, columns, channels,
                    ACT: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The gradient of x, from the gradients (WIDTH,) of weight and bias."""
    for start in range(begin, end, TILE):
        offsets, wanted = tile(start, rows, columns, channels, TILE)
        values = tl.load(x + offsets, mask=wanted, other=0.0).to(tl.float32)
        normal = normalised(values, centre, scale)
        gradient = tl.load(given + offsets, mask=wanted, other=0.0).to(tl.float32)
        gradient = before_activation(gradient, normal * gain[None, :] + shift[None, :], ACT)
        result = before_norm(gradient, normal, scale, gain, of_weight, of_bias, rows)
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=wanted)


# ---- many rows: sums by stretches, their totals, then every value -------------------------------------------


@triton.jit(do_not_specialize=SIZES)
def value_sums(x, partial, rows, stretch, groups, TILE: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr):
    """Partial sums (stretches, 2, C); C is `groups` groups `OF` so many channels."""
    channels = groups * OF
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    begin = tl.program_id(0) * stretch
    first, second = _sum_values(x, begin, begin + stretch, rows, columns, channels, TILE, WIDTH)
    target = partial + tl.program_id(0) * 2 * channels + columns
    tl.store(target, first, mask=columns < channels)
    tl.store(target + channels, second, mask=columns < channels)


@triton.jit(do_not_specialize=SIZES)
def gradient_sums(x, given, mean, inverse, weight, bias, partial, rows, stretch, groups, ACT: tl.constexpr,
                   TILE: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr):  # fmt: skip
    """Partial sums (stretches, 2, C) of the gradient `given`, and of that times the normalised x."""
    channels = groups * OF
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    centre, scale, gain, shift = known_of(mean, inverse, weight, bias, columns, channels)
    begin = tl.program_id(0) * stretch
    first, second = _sum_gradients(
        x, given, centre, scale, gain, shift, begin, begin + stretch, rows, columns, channels, ACT, TILE, WIDTH
    )
    target = partial + tl.program_id(0) * 2 * channels + columns
    tl.store(target, first, mask=columns < channels)
    tl.store(target + channels, second, mask=columns < channels)


@triton.jit
def totals(partial, columns, stretches, channels, STRETCHES: tl.constexpr):
    """Partial sums (stretches, 2, C) added up: two times (WIDTH,)."""
    places = tl.arange(0, STRETCHES)
    wanted = (places < stretches)[:, None] & (columns < channels)[None, :]
    offsets = places[:, None] * 2 * channels + columns[None, :]
    first = tl.sum(tl.load(partial + offsets, mask=wanted, other=0.0), axis=0)
    return first, tl.sum(tl.load(partial + offsets + channels, mask=wanted, other=0.0), axis=0)


@triton.jit(do_not_specialize=SIZES)
def statistics(x, partial, mean, inverse, running_mean, running_variance, counter, rows, stretches, channels, momentum,
                epsilon, STRETCHES: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Mean and inverse deviation (C,) of a batch; the running statistics and their counter move on."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    first, second = totals(partial, columns, stretches, channels, STRETCHES)
    _note_statistics(
        x, first, second, mean, inverse, running_mean, running_variance, rows, columns, channels, momentum, epsilon
    )
    if tl.program_id(0) == 0:
        tl.store(counter, tl.load(counter) + 1)


@triton.jit(do_not_specialize=SIZES)
def gradient_totals(partial, of_weight, of_bias, stretches, channels, STRETCHES: tl.constexpr, WIDTH: tl.constexpr):
    """Gradients of bias and weight (C,): the partial sums of a backward pass, added up."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    first, second = totals(partial, columns, stretches, channels, STRETCHES)
    tl.store(of_bias + columns, first, mask=columns < channels)
    tl.store(of_weight + columns, second, mask=columns < channels)


@triton.jit(do_not_specialize=SIZES)
def each_normal(x, out, mean, inverse, weight, bias, rows, groups, ACT: tl.constexpr, TILE: tl.constexpr,
                 WIDTH: tl.constexpr, OF: tl.constexpr):  # fmt: skip
    """x, normalised: a tile for each program."""
    channels = groups * OF
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    centre, scale, gain, shift = known_of(mean, inverse, weight, bias, columns, channels)
    begin = tl.program_id(0) * TILE
    _write_normal(x, out, centre, scale, gain, shift, begin, begin + TILE, rows, columns, channels, ACT, TILE)


@triton.jit(do_not_specialize=SIZES)
def each_gradient(x, given, out, mean, inverse, weight, bias, of_weight, of_bias, rows, groups, ACT: tl.constexpr,
                   TILE: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr):  # fmt: skip
    """The gradient of x: a tile for each program."""
    channels = groups * OF
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    centre, scale, gain, shift = known_of(mean, inverse, weight, bias, columns, channels)
    slope, level = of_channels(of_weight, columns, channels), of_channels(of_bias, columns, channels)
    begin = tl.program_id(0) * TILE
    end = begin + TILE
    _write_gradient(
        x, given, out, centre, scale, gain, shift, slope, level, begin, end, rows, columns, channels, ACT, TILE
    )


@triton.jit(do_not_specialize=SIZES)
def still_gradient(x, given, out, mean, inverse, weight, bias, rows, groups, ACT: tl.constexpr, TILE: tl.constexpr,
                   WIDTH: tl.constexpr, OF: tl.constexpr):  # fmt: skip
    """The gradient of x where mean and deviation do not depend on it: a tile for each program."""
    channels = groups * OF
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    centre, scale, gain, shift = known_of(mean, inverse, weight, bias, columns, channels)
    offsets, wanted = tile(tl.program_id(0) * TILE, rows, columns, channels, TILE)
    gradient = tl.load(given + offsets, mask=wanted, other=0.0).to(tl.float32)
    values = normalised(tl.load(x + offsets, mask=wanted, other=0.0).to(tl.float32), centre, scale)
    gradient = before_activation(gradient, values * gain[None, :] + shift[None, :], ACT)
    tl.store(out + offsets, (gradient * (gain * scale)[None, :]).to(out.dtype.element_ty), mask=wanted)


# ---- few rows: everything at once ---------------------------------------------------------------------------


@triton.jit(do_not_specialize=SIZES)
def few_forward(x, out, mean, inverse, weight, bias, running_mean, running_variance, counter, rows, groups, momentum,
                 epsilon, ACT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr):  # fmt: skip
    """The whole forward pass of some channels: their rows are read twice."""
    channels = groups * OF
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    first, second = _sum_values(x, 0, rows, rows, columns, channels, TILE, WIDTH)
    centre, scale = _note_statistics(
        x, first, second, mean, inverse, running_mean, running_variance, rows, columns, channels, momentum, epsilon
    )
    if tl.program_id(0) == 0:
        tl.store(counter, tl.load(counter) + 1)
    gain, shift = of_channels(weight, columns, channels), of_channels(bias, columns, channels)
    _write_normal(x, out, centre, scale, gain, shift, 0, rows, rows, columns, channels, ACT, TILE)


@triton.jit(do_not_specialize=SIZES)
def few_backward(x, given, out, mean, inverse, weight, bias, of_weight, of_bias, rows, groups, ACT: tl.constexpr,
                  TILE: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr):  # fmt: skip
    """The whole backward pass of some channels."""
    channels = groups * OF
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    centre, scale, gain, shift = known_of(mean, inverse, weight, bias, columns, channels)
    level, slope = _sum_gradients(
        x, given, centre, scale, gain, shift, 0, rows, rows, columns, channels, ACT, TILE, WIDTH
    )
    tl.store(of_bias + columns, level, mask=columns < channels)
    tl.store(of_weight + columns, slope, mask=columns < channels)
    _write_gradient(
        x, given, out, centre, scale, gain, shift, slope, level, 0, rows, rows, columns, channels, ACT, TILE
    )
