# mypy: allow-untyped-defs
"""Batch norm of channels-last images in training, an activation and max pooling by windows of 2 x 2, as Triton kernels
for a GPU that neither write nor read what lies between them.

Values are rounded before the largest is chosen, as if they had been written. So all three together give the same bits
as one by one. (With few rows, statistics are added in another order.) The forward pass
keeps, for each window, which value was chosen and the x that it was made of: the gradients of weight and bias are sums
over these alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.nets.kernels.norm_kernels import (
    activated,
    before_activation,
    before_norm,
    known_of,
    normalised,
    of_channels,
)
from equipoise.nets.kernels.norm_training import (
    NUMBERS,
    Plan,
    differentiable_backward,
    statistics_of,
    summed_gradients,
)
from equipoise.nets.kernels.pool_kernels import (
    SIZES,
    empty_images,
    outdoes,
    plan_windows,
    spread_over_windows,
    window_places,
    window_step,
)


@triton.jit
def _result(x, out, centre, scale, gain, shift, ACT: tl.constexpr):
    """What batch norm and activation make of x (TILE, WIDTH), as precise as `out` would hold it."""
    result = activated(normalised(x, centre, scale) * gain[None, :] + shift[None, :], ACT)
    return result.to(out.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def _choose_normal(x, out, origins, chosen, mean, inverse, weight, bias, pixels, across, groups, ACT: tl.constexpr,
                   TILE: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr):  # fmt: skip
    """The largest value of each window, the x that it was made of, and which it was. `pixels` come out, `across` in
    each row of an image, of `groups` groups `OF` so many channels."""
    channels = groups * OF
    pooled, corners, wanted = window_places(pixels, across, channels, TILE, WIDTH)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    centre, scale, gain, shift = known_of(mean, inverse, weight, bias, columns, channels)
    origin = tl.load(x + corners, mask=wanted, other=0.0).to(tl.float32)
    best = _result(origin, out, centre, scale, gain, shift, ACT)
    choice = tl.zeros((TILE, WIDTH), dtype=tl.int32)
    for place in tl.static_range(1, 4):
        value = tl.load(x + corners + window_step(place, across, channels), mask=wanted, other=0.0).to(tl.float32)
        result = _result(value, out, centre, scale, gain, shift, ACT)
        better = outdoes(result, best)
        best = tl.where(better, result, best)
        origin = tl.where(better, value, origin)
        choice = tl.where(better, place, choice)
    tl.store(out + pooled, best.to(out.dtype.element_ty), mask=wanted)
    tl.store(origins + pooled, origin.to(origins.dtype.element_ty), mask=wanted)
    tl.store(chosen + pooled, choice.to(tl.uint8), mask=wanted)


@triton.jit(do_not_specialize=SIZES)
def _hand_back_normal(x, given, chosen, of_x, mean, inverse, weight, bias, of_weight, of_bias, pixels, across, groups,
                      ACT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr):  # fmt: skip
    """The gradient of x, from that `given` of what came out and the gradients (C,) of weight and bias."""
    channels = groups * OF
    pooled, corners, wanted = window_places(pixels, across, channels, TILE, WIDTH)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    centre, scale, gain, shift = known_of(mean, inverse, weight, bias, columns, channels)
    slope, level = of_channels(of_weight, columns, channels), of_channels(of_bias, columns, channels)
    gradient = tl.load(given + pooled, mask=wanted, other=0.0).to(tl.float32)
    choice = tl.load(chosen + pooled, mask=wanted, other=0)
    for place in tl.static_range(4):
        offsets = corners + window_step(place, across, channels)
        normal = normalised(tl.load(x + offsets, mask=wanted, other=0.0).to(tl.float32), centre, scale)
        own = tl.where(choice == place, gradient, 0.0)
        own = before_activation(own, normal * gain[None, :] + shift[None, :], ACT)
        result = before_norm(own, normal, scale, gain, slope, level, 4 * pixels)
        tl.store(of_x + offsets, result.to(of_x.dtype.element_ty), mask=wanted)


class PooledBatchNormTraining(torch.autograd.Function):
    """Batch norm by the statistics of the batch, an activation, and the largest value of each window of 2 x 2; moves
    the running statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor, Tensor, Tensor],
        momentum: float,
        epsilon: float,
        activation: str,
    ) -> Tensor:
        """x (B, C, H, W), channels last, H and W even; the others as for `BatchNormTraining`. (B, C, H / 2, W / 2)."""
        # Few rows have no special kernels here.
        mean, inverse = statistics_of(x, Plan(x, few_rows=0), running, momentum, epsilon)
        height, width = x.shape[2] // 2, x.shape[3] // 2
        out, origins, chosen = (empty_images(x, height, width, dtype) for dtype in (x.dtype, x.dtype, torch.uint8))
        grid, sizes, constants = plan_windows(out)
        act = NUMBERS[activation]
        _choose_normal[grid](x, out, origins, chosen, mean, inverse, weight, bias, *sizes, act, **constants)
        ctx.save_for_backward(x, weight, bias, mean, inverse, origins, chosen)
        ctx.epsilon, ctx.activation = epsilon, activation
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias."""
        x, weight, bias, mean, inverse, origins, chosen = ctx.saved_tensors
        (given,) = gradients
        if torch.is_grad_enabled():  # somebody wants gradients of these gradients
            spread = spread_over_windows(given, chosen)
            found = differentiable_backward(x, weight, bias, spread, ctx.epsilon, ctx.activation)
            return (*found, None, None, None, None)
        given = given.contiguous(memory_format=torch.channels_last)
        known, act = (mean, inverse, weight, bias), NUMBERS[ctx.activation]
        of_weight, of_bias = summed_gradients(origins, given, Plan(origins, few_rows=0), known, act)
        of_x = torch.empty_like(x)
        grid, sizes, constants = plan_windows(given)
        _hand_back_normal[grid](x, given, chosen, of_x, *known, of_weight, of_bias, *sizes, act, **constants)
        return of_x, of_weight, of_bias, None, None, None, None
