# mypy: allow-untyped-defs
"""Mean and variance over pixels of channels-last images, and their gradient, as Triton kernels for a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.nets.kernels.norm_kernels import SIZES, centre_and_variance, of_channels, tile, totals, value_sums
from equipoise.nets.kernels.norm_training import Plan


@triton.jit(do_not_specialize=SIZES)
def _moments(x, partial, mean, variance, rows, stretches, channels, STRETCHES: tl.constexpr, WIDTH: tl.constexpr):
    """Mean and biased variance (C,) from partial sums (stretches, 2, C)."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    first, second = totals(partial, columns, stretches, channels, STRETCHES)
    centre, spread = centre_and_variance(x, first, second, rows, columns, channels)
    tl.store(mean + columns, centre, mask=columns < channels)
    tl.store(variance + columns, spread, mask=columns < channels)


@triton.jit(do_not_specialize=SIZES)
def _moments_gradient(x, out, mean, of_mean, of_variance, rows, groups, TILE: tl.constexpr, WIDTH: tl.constexpr,
                      OF: tl.constexpr):  # fmt: skip
    """The gradient of x, from those (C,) of mean and variance: a tile for each program."""
    channels = groups * OF
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    centre = of_channels(mean, columns, channels)
    level = of_channels(of_mean, columns, channels) / rows
    slope = 2 * of_channels(of_variance, columns, channels) / rows
    offsets, wanted = tile(tl.program_id(0) * TILE, rows, columns, channels, TILE)
    values = tl.load(x + offsets, mask=wanted, other=0.0).to(tl.float32)
    result = level[None, :] + slope[None, :] * (values - centre[None, :])
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=wanted)


class Moments(torch.autograd.Function):
    """Mean and biased variance of each channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, C, H, W), channels last; (C,) each, float32."""
        plan = Plan(x, few_rows=0)
        partial = x.new_empty(plan.stretches, 2, plan.channels, dtype=torch.float32)
        value_sums[plan.sums](x, partial, plan.rows, plan.stretch, plan.groups, **plan.sizes)
        mean, variance = partial.new_empty(plan.channels), partial.new_empty(plan.channels)
        _moments[plan.totals](x, partial, mean, variance, plan.rows, plan.stretches, plan.channels, **plan.total_sizes)
        ctx.save_for_backward(x, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient of x."""
        x, mean = ctx.saved_tensors
        of_mean, of_variance = gradients
        if torch.is_grad_enabled():  # somebody wants gradients of this gradient
            values = x.float()
            centred = values - values.mean((0, 2, 3), keepdim=True)
            found = of_mean[:, None, None] + 2 * of_variance[:, None, None] * centred
            return (found * x.shape[1] / x.numel()).to(x.dtype)
        plan, of_x = Plan(x, few_rows=0), torch.empty_like(x)
        _moments_gradient[plan.each](
            x, of_x, mean, of_mean.contiguous(), of_variance.contiguous(), plan.rows, plan.groups, **plan.sizes
        )
        return of_x
