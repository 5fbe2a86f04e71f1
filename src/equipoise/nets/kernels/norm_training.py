"""Batch norm in training and by statistics that stand still, and an activation with it, for autograd: the kernels of
`norm_kernels` put to work."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from equipoise.nets.kernels.activations import ACTIVATIONS, LEAK
from equipoise.nets.kernels.layout import channel_groups, channel_width
from equipoise.nets.kernels.norm_kernels import (
    each_gradient,
    each_normal,
    few_backward,
    few_forward,
    gradient_sums,
    gradient_totals,
    statistics,
    still_gradient,
    value_sums,
)

#: what kernels know activations by
NUMBERS = {name: number for number, name in enumerate(("", *ACTIVATIONS))}
#: values that a program reads at a time
TILE_VALUES = 4096
#: stretches of rows to add up at most: about two for each processor of a large GPU
MOST_STRETCHES = 256
#: channels that a program adds up stretches of
TOTALS_WIDTH = 16
#: rows that one program goes over by itself, for so many channels, so many values at a time
FEW_ROWS, FEW_WIDTH, FEW_TILE_VALUES, FEW_WARPS = 1024, 16, 8192, 8


class Plan:
    """How rows and channels are dealt out to programs; up to `few_rows` rows are left to one program."""

    def __init__(self, x: Tensor, few_rows: int = FEW_ROWS):
        self.channels = x.shape[1]
        self.rows = x.numel() // self.channels
        self.few = self.rows <= few_rows
        self.width = FEW_WIDTH if self.few else channel_width(self.channels)
        self.tile = (FEW_TILE_VALUES if self.few else TILE_VALUES) // self.width
        self.groups, group = channel_groups(self.channels)
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
        plan, act = Plan(x), NUMBERS[activation]
        rows, groups, out = plan.rows, plan.groups, torch.empty_like(x)
        if plan.few:
            mean, inverse = torch.empty_like(weight), torch.empty_like(weight)
            few_forward[(plan.across,)](
                x, out, mean, inverse, weight, bias, *running, rows, groups, momentum, epsilon, act, **plan.sizes,
                num_warps=FEW_WARPS,
            )  # fmt: skip
        else:
            mean, inverse = statistics_of(x, plan, running, momentum, epsilon)
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
            found = differentiable_backward(x, weight, bias, given, ctx.epsilon, ctx.activation)
            return (*found, None, None, None, None)
        given = given.contiguous(memory_format=torch.channels_last)
        plan, act = Plan(x), NUMBERS[ctx.activation]
        rows, groups, of_x = plan.rows, plan.groups, torch.empty_like(x)
        known = (mean, inverse, weight, bias)
        if plan.few:
            of_weight, of_bias = torch.empty_like(weight), torch.empty_like(weight)
            few_backward[(plan.across,)](
                x, given, of_x, *known, of_weight, of_bias, rows, groups, act, **plan.sizes, num_warps=FEW_WARPS
            )
        else:
            of_weight, of_bias = summed_gradients(x, given, plan, known, act)
            each_gradient[plan.each](x, given, of_x, *known, of_weight, of_bias, rows, groups, act, **plan.sizes)
        return of_x, of_weight, of_bias, None, None, None, None


class FrozenBatchNorm(torch.autograd.Function):
    """Batch norm by running statistics that stand still, as weight and bias do, then an activation if one is named."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        epsilon: float,
        activation: str,
    ) -> Tensor:
        """x (B, C, H, W), channels last; the others (C,), float32."""
        plan, out, inverse = Plan(x, few_rows=0), torch.empty_like(x), torch.rsqrt(variance + epsilon)
        known = (mean, inverse, weight, bias)
        each_normal[plan.each](x, out, *known, plan.rows, plan.groups, NUMBERS[activation], **plan.sizes)
        ctx.save_for_backward(x, *known)
        ctx.activation = activation
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x."""
        x, *known = ctx.saved_tensors
        (given,) = gradients
        if torch.is_grad_enabled():  # somebody wants gradients of this gradient
            mean, inverse, weight, bias = (tensor[:, None, None] for tensor in known)
            slope = _slope((x.float() - mean) * inverse * weight + bias, ctx.activation)
            of_x = (given.float() * slope * inverse * weight).to(x.dtype)
        else:
            given = given.contiguous(memory_format=torch.channels_last)
            plan, of_x, act = Plan(x, few_rows=0), torch.empty_like(x), NUMBERS[ctx.activation]
            still_gradient[plan.each](x, given, of_x, *known, plan.rows, plan.groups, act, **plan.sizes)
        return of_x, None, None, None, None, None, None


def statistics_of(
    x: Tensor, plan: Plan, running: tuple[Tensor, Tensor, Tensor], momentum: float, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation (C,) of x (B, C, H, W); moves the running statistics and their counter."""
    mean, inverse = torch.empty_like(running[0]), torch.empty_like(running[0])
    partial = mean.new_empty(plan.stretches, 2, plan.channels)
    value_sums[plan.sums](x, partial, plan.rows, plan.stretch, plan.groups, **plan.sizes)
    statistics[plan.totals](
        x, partial, mean, inverse, *running, plan.rows, plan.stretches, plan.channels, momentum, epsilon,
        **plan.total_sizes,
    )  # fmt: skip
    return mean, inverse


def summed_gradients(
    x: Tensor, given: Tensor, plan: Plan, known: tuple[Tensor, ...], act: int
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias (C,) from x and the gradient given (B, C, H, W), and from what is `known`: mean,
    inverse deviation, weight and bias (C,)."""
    of_weight, of_bias = torch.empty_like(known[0]), torch.empty_like(known[0])
    partial = of_weight.new_empty(plan.stretches, 2, plan.channels)
    gradient_sums[plan.sums](x, given, *known, partial, plan.rows, plan.stretch, plan.groups, act, **plan.sizes)
    gradient_totals[plan.totals](partial, of_weight, of_bias, plan.stretches, plan.channels, **plan.total_sizes)
    return of_weight, of_bias


def differentiable_backward(
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
    if activation == "leaky_relu":
        return torch.where(values <= 0, LEAK, 1.0)
    flat = torch.zeros_like(values, dtype=torch.bool)
    if activation in ("relu", "relu6"):
        flat = values <= 0
    if activation == "relu6":
        flat = flat | (values >= 6)
    return (~flat).to(values.dtype)
