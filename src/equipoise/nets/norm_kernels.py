# mypy: allow-untyped-defs
"""Batch norm of channels-last images in training, with or without ReLU after it, as Triton kernels for a GPU.

An image batch (B, C, H, W) lies in memory as rows of C channels. Sums over rows are taken in float32 and in two stages,
first over stretches of rows and then over stretches, in a fixed order: no atomics, so that repeats give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: values that a program reads at a time
TILE_VALUES = 2048
#: stretches of rows to add up at most: about two for each processor of a large GPU
MOST_STRETCHES = 256
#: tiles that a program goes over where nothing is added up
TILES_EACH = 4


@triton.jit
def _row_sums(x, other, mean, inverse, weight, bias, partial, rows, stretch, channels, BACKWARD: tl.constexpr,
              RELU: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Partial sums (stretches, 2, C). Forward: of x less its first row, and squared. Backward: of the gradient
    `other` (where ReLU let values through), and of that times the normalised x."""
    block = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < channels
    if BACKWARD:
        centre = tl.load(mean + columns, mask=inside, other=0.0)
        scale = tl.load(inverse + columns, mask=inside, other=0.0)
        gain = tl.load(weight + columns, mask=inside, other=0.0)
        shift = tl.load(bias + columns, mask=inside, other=0.0)
    else:
        centre = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        scale, gain, shift = centre, centre, centre
    first = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    second = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    for start in range(0, stretch, TILE):
        places = block * stretch + start + tl.arange(0, TILE)
        wanted = (places < rows)[:, None] & inside[None, :]
        offsets = places[:, None].to(tl.int64) * channels + columns[None, :]
        values = tl.load(x + offsets, mask=wanted, other=0.0).to(tl.float32) - centre[None, :]
        if BACKWARD:
            gradient = tl.load(other + offsets, mask=wanted, other=0.0).to(tl.float32)
            normal = values * scale[None, :]
            if RELU:
                gradient = tl.where(normal * gain[None, :] + shift[None, :] > 0, gradient, 0.0)
            first += gradient
            second += gradient * normal
        else:
            values = tl.where(wanted, values, 0.0)
            first += values
            second += values * values
    target = partial + block * 2 * channels + columns
    tl.store(target, tl.sum(first, axis=0), mask=inside)
    tl.store(target + channels, tl.sum(second, axis=0), mask=inside)


@triton.jit
def _statistics(x, partial, mean, inverse, running_mean, running_variance, rows, stretches, channels, momentum, epsilon,
                STRETCHES: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Mean and inverse deviation (C,) of a batch, and the running statistics moved towards them."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < channels
    places = tl.arange(0, STRETCHES)
    wanted = (places < stretches)[:, None] & inside[None, :]
    offsets = places[:, None] * 2 * channels + columns[None, :]
    first = tl.sum(tl.load(partial + offsets, mask=wanted, other=0.0), axis=0) / rows
    second = tl.sum(tl.load(partial + offsets + channels, mask=wanted, other=0.0), axis=0) / rows
    centre = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32) + first
    variance = tl.maximum(second - first * first, 0.0)
    tl.store(mean + columns, centre, mask=inside)
    tl.store(inverse + columns, 1.0 / tl.sqrt(variance + epsilon), mask=inside)
    unbiased = variance * (rows / (rows - 1.0))
    old = tl.load(running_mean + columns, mask=inside, other=0.0)
    tl.store(running_mean + columns, old + momentum * (centre - old), mask=inside)
    old = tl.load(running_variance + columns, mask=inside, other=0.0)
    tl.store(running_variance + columns, old + momentum * (unbiased - old), mask=inside)


@triton.jit
def _gradient_totals(partial, weight_gradient, bias_gradient, stretches, channels, STRETCHES: tl.constexpr,
                     WIDTH: tl.constexpr):  # fmt: skip
    """Gradients of bias and weight (C,): the partial sums of a backward pass, added up."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < channels
    places = tl.arange(0, STRETCHES)
    wanted = (places < stretches)[:, None] & inside[None, :]
    offsets = places[:, None] * 2 * channels + columns[None, :]
    tl.store(bias_gradient + columns, tl.sum(tl.load(partial + offsets, mask=wanted, other=0.0), axis=0), mask=inside)
    second = tl.sum(tl.load(partial + offsets + channels, mask=wanted, other=0.0), axis=0)
    tl.store(weight_gradient + columns, second, mask=inside)


@triton.jit
def _each_value(x, other, out, mean, inverse, weight, bias, weight_gradient, bias_gradient, rows, stretch, channels,
                BACKWARD: tl.constexpr, RELU: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Forward: x, normalised. Backward: the gradient of x, from the gradient `other` of what came out."""
    block = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < channels
    centre = tl.load(mean + columns, mask=inside, other=0.0)
    scale = tl.load(inverse + columns, mask=inside, other=0.0)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    shift = tl.load(bias + columns, mask=inside, other=0.0)
    if BACKWARD:
        level = tl.load(bias_gradient + columns, mask=inside, other=0.0) / rows
        slope = tl.load(weight_gradient + columns, mask=inside, other=0.0) / rows
    else:
        level, slope = shift, shift
    for start in range(0, stretch, TILE):
        places = block * stretch + start + tl.arange(0, TILE)
        wanted = (places < rows)[:, None] & inside[None, :]
        offsets = places[:, None].to(tl.int64) * channels + columns[None, :]
        values = tl.load(x + offsets, mask=wanted, other=0.0).to(tl.float32)
        normal = (values - centre[None, :]) * scale[None, :]
        result = normal * gain[None, :] + shift[None, :]
        if BACKWARD:
            gradient = tl.load(other + offsets, mask=wanted, other=0.0).to(tl.float32)
            if RELU:
                gradient = tl.where(result > 0, gradient, 0.0)
            result = (gradient - level[None, :] - normal * slope[None, :]) * (gain * scale)[None, :]
        elif RELU:
            result = tl.maximum(result, 0.0)
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=wanted)


class _Plan:
    """How rows and channels are dealt out to programs."""

    def __init__(self, x: Tensor):
        self.channels = x.shape[1]
        self.rows = x.numel() // self.channels
        self.width = min(max(triton.next_power_of_2(self.channels), 32), 64)
        self.tile = TILE_VALUES // self.width
        self.stretch = triton.cdiv(triton.cdiv(self.rows, MOST_STRETCHES), self.tile) * self.tile
        self.stretches = triton.cdiv(self.rows, self.stretch)
        self.across = triton.cdiv(self.channels, self.width)
        self.sizes = {"TILE": self.tile, "WIDTH": self.width}

    @property
    def sums(self) -> tuple[int, int]:
        """The grid of a kernel that adds up rows by stretches."""
        return self.stretches, self.across

    @property
    def run(self) -> int:
        """Rows that a program goes over in a kernel that takes each value by itself."""
        return TILES_EACH * self.tile

    @property
    def each(self) -> tuple[int, int]:
        """The grid of such a kernel."""
        return triton.cdiv(self.rows, self.run), self.across

    @property
    def totals(self) -> tuple[tuple[int], dict[str, int]]:
        """The grid and constants of a kernel that adds up stretches."""
        return (triton.cdiv(self.channels, 16),), {"STRETCHES": MOST_STRETCHES, "WIDTH": 16}


class BatchNormTraining(torch.autograd.Function):
    """Batch norm by the statistics of the batch, then ReLU if asked for; moves the running statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor, Tensor],
        momentum: float,
        epsilon: float,
        relu: bool,
    ) -> Tensor:
        """x (B, C, H, W), channels last; weight, bias and running mean and variance (C,), float32."""
        plan = _Plan(x)
        rows, stretch, channels = plan.rows, plan.stretch, plan.channels
        partial = weight.new_empty(plan.stretches, 2, channels)
        mean, inverse, out = torch.empty_like(weight), torch.empty_like(weight), torch.empty_like(x)
        _row_sums[plan.sums](
            x, x, mean, inverse, weight, bias, partial, rows, stretch, channels, False, relu, **plan.sizes
        )
        totals, widths = plan.totals
        _statistics[totals](
            x, partial, mean, inverse, *running, rows, plan.stretches, channels, momentum, epsilon, **widths
        )
        _each_value[plan.each](
            x, x, out, mean, inverse, weight, bias, mean, mean, rows, plan.run, channels, False, relu, **plan.sizes
        )
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.epsilon, ctx.relu = epsilon, relu
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias."""
        x, weight, bias, mean, inverse = ctx.saved_tensors
        (gradient,) = gradients
        if torch.is_grad_enabled():  # somebody wants gradients of these gradients
            found = _differentiable_backward(x, weight, bias, gradient, ctx.epsilon, ctx.relu)
            return (*found, None, None, None, None)
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        plan = _Plan(x)
        rows, stretch, channels = plan.rows, plan.stretch, plan.channels
        partial = weight.new_empty(plan.stretches, 2, channels)
        of_weight, of_bias, of_x = torch.empty_like(weight), torch.empty_like(weight), torch.empty_like(x)
        _row_sums[plan.sums](
            x, gradient, mean, inverse, weight, bias, partial, rows, stretch, channels, True, ctx.relu, **plan.sizes
        )
        totals, widths = plan.totals
        _gradient_totals[totals](partial, of_weight, of_bias, plan.stretches, channels, **widths)
        _each_value[plan.each](
            x, gradient, of_x, mean, inverse, weight, bias, of_weight, of_bias, rows, plan.run, channels, True,
            ctx.relu, **plan.sizes,
        )  # fmt: skip
        return of_x, of_weight, of_bias, None, None, None, None


def _differentiable_backward(
    x: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor, epsilon: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass in operations that autograd can go through again."""
    pixels = (0, 2, 3)
    values, given = x.float(), gradient.float()
    variance, mean = torch.var_mean(values, dim=pixels, correction=0, keepdim=True)
    inverse = torch.rsqrt(variance + epsilon)
    normal = (values - mean) * inverse
    if relu:
        given = given * (normal * weight[:, None, None] + bias[:, None, None] > 0)
    of_bias, of_weight = given.sum(pixels), (given * normal).sum(pixels)
    rest = given - given.mean(pixels, keepdim=True) - normal * (given * normal).mean(pixels, keepdim=True)
    of_x = (rest * inverse * weight[:, None, None]).to(x.dtype)
    return of_x, of_weight, of_bias
