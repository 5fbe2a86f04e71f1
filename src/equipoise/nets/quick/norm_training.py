"""Batch norm in training, and an activation with it, for autograd: the kernels of `norm_kernels` put to work."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from equipoise.nets.quick.norm_kernels import (
    each_gradient,
    each_normal,
    few_backward,
    few_forward,
    gradient_sums,
    gradient_totals,
    statistics,
    value_sums,
)

#: by the numbers that kernels know them by
ACTIVATIONS = ("", "relu", "relu6", "silu")
#: values that a program reads at a time
TILE_VALUES = 4096
#: stretches of rows to add up at most: about two for each processor of a large GPU
MOST_STRETCHES = 256
#: channels that a program adds up stretches of
TOTALS_WIDTH = 16
#: rows that one program goes over by itself, for so many channels, so many values at a time
FEW_ROWS, FEW_WIDTH, FEW_TILE_VALUES, FEW_WARPS = 1024, 16, 8192, 8
#: channels are counted in groups of 8 where they can be: what a processor reads at once
GROUP = 8


class _Plan:
    """How rows and channels are dealt out to programs."""

    def __init__(self, x: Tensor):
        self.channels = x.shape[1]
        self.rows = x.numel() // self.channels
        self.few = self.rows <= FEW_ROWS
        self.width = FEW_WIDTH if self.few else min(max(triton.next_power_of_2(self.channels), 32), 64)
        self.tile = (FEW_TILE_VALUES if self.few else TILE_VALUES) // self.width
        group = GROUP if self.channels % GROUP == 0 else 1
        self.groups = self.channels // group
        self.across = triton.cdiv(self.channels, self.width)
        self.sizes = {"TILE": self.tile, "WIDTH": self.width, "OF": group}
        self.stretch = triton.cdiv(triton.cdiv(self.rows, MOST_STRETCHES), self.tile) * self.tile
        self.stretches = triton.cdiv(self.rows, self.stretch)
        self.total_sizes = {"STRETCHES": MOST_STRETCHES, "WIDTH": TOTALS_WIDTH}

    @property
    def sums(self) -> tuple[int, int]:
        """The grid of a kernel that adds up rows by stretches."""
        return self.stretches, self.across

    @property
    def totals(self) -> tuple[int]:
        """The grid of a kernel that adds up stretches."""
        return (triton.cdiv(self.channels, TOTALS_WIDTH),)

    @property
    def each(self) -> tuple[int, int]:
        """The grid of a kernel that takes each value by itself."""
        return triton.cdiv(self.rows, self.tile), self.across


class BatchNormTraining(torch.autograd.Function):
    """Batch norm by the statistics of the batch, then an activation if one is named; moves the running statistics."""

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
        """x (B, C, H, W), channels last; weight, bias and running mean and variance (C,), float32; their counter."""
        plan, act = _Plan(x), ACTIVATIONS.index(activation)
        rows, channels, groups = plan.rows, plan.channels, plan.groups
        mean, inverse, out = torch.empty_like(weight), torch.empty_like(weight), torch.empty_like(x)
        if plan.few:
            few_forward[(plan.across,)](
                x, out, mean, inverse, weight, bias, *running, rows, groups, momentum, epsilon, act, **plan.sizes,
                num_warps=FEW_WARPS,
            )  # fmt: skip
        else:
            partial = weight.new_empty(plan.stretches, 2, channels)
            value_sums[plan.sums](x, partial, rows, plan.stretch, groups, **plan.sizes)
            statistics[plan.totals](
                x, partial, mean, inverse, *running, rows, plan.stretches, channels, momentum, epsilon,
                **plan.total_sizes,
            )  # fmt: skip
            each_normal[plan.each](x, out, mean, inverse, weight, bias, rows, groups, act, **plan.sizes)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.epsilon, ctx.activation = epsilon, activation
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias."""
        x, weight, bias, mean, inverse = ctx.saved_tensors
        (given,) = gradients
        if torch.is_grad_enabled():  # somebody wants gradients of these gradients
            found = _differentiable_backward(x, weight, bias, given, ctx.epsilon, ctx.activation)
            return (*found, None, None, None, None)
        given = given.contiguous(memory_format=torch.channels_last)
        plan, act = _Plan(x), ACTIVATIONS.index(ctx.activation)
        rows, channels, groups = plan.rows, plan.channels, plan.groups
        of_weight, of_bias, of_x = torch.empty_like(weight), torch.empty_like(weight), torch.empty_like(x)
        known = (mean, inverse, weight, bias)
        if plan.few:
            few_backward[(plan.across,)](
                x, given, of_x, *known, of_weight, of_bias, rows, groups, act, **plan.sizes, num_warps=FEW_WARPS
            )
        else:
            partial = weight.new_empty(plan.stretches, 2, channels)
            gradient_sums[plan.sums](x, given, *known, partial, rows, plan.stretch, groups, act, **plan.sizes)
            gradient_totals[plan.totals](partial, of_weight, of_bias, plan.stretches, channels, **plan.total_sizes)
            each_gradient[plan.each](x, given, of_x, *known, of_weight, of_bias, rows, groups, act, **plan.sizes)
        return of_x, of_weight, of_bias, None, None, None, None


def _differentiable_backward(
    x: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor, epsilon: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass in operations that autograd can go through again."""
    pixels = (0, 2, 3)
    values, given = x.float(), gradient.float()
    variance, mean = torch.var_mean(values, dim=pixels, correction=0, keepdim=True)
    inverse = torch.rsqrt(variance + epsilon)
    normal = (values - mean) * inverse
    given = given * _slope(normal * weight[:, None, None] + bias[:, None, None], activation)
    of_bias, of_weight = given.sum(pixels), (given * normal).sum(pixels)
    rest = given - given.mean(pixels, keepdim=True) - normal * (given * normal).mean(pixels, keepdim=True)
    of_x = (rest * inverse * weight[:, None, None]).to(x.dtype)
    return of_x, of_weight, of_bias


def _slope(values: Tensor, activation: str) -> Tensor:
    """The derivative of the activation at values."""
    if activation == "silu":
        share = values.sigmoid()
        return share * (1 + values * (1 - share))
    flat = torch.zeros_like(values, dtype=torch.bool)
    if activation in ("relu", "relu6"):
        flat = values <= 0
    if activation == "relu6":
        flat = flat | (values >= 6)
    return (~flat).to(values.dtype)
