"""Convolutions for bfloat16 on a GPU: weights are rounded all at once, and a kernel of one pixel is a matrix product.

Autocast rounds each layer's weight in a separate kernel, and its gradient in another; small steps wait for launches.
A product avoids cuDNN's search for a plan at each new shape. For an EfficientNet's many such layers, the search takes
longer than all captures of a run. Values are the same either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels.replacement import Replacement, exactly
from equipoise.nets.net import Net


class QuickConv2d(nn.Conv2d):
    """`nn.Conv2d` whose weight may have been rounded before."""

    rounded: Tensor | None = None
    """The weight in the precision of the pass that is under way."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W)."""
        return self._conv_forward(images, self.weight if self.rounded is None else self.rounded, self.bias)


class PointwiseConv2d(QuickConv2d):
    """One with a kernel of one pixel."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)


def _is_pointwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == layer.stride == (1, 1) and layer.padding in ((0, 0), "valid") and layer.groups == 1


quicken_convolutions = Replacement(
    QuickConv2d,
    exactly(nn.Conv2d),
    settle=Replacement(PointwiseConv2d, exactly(QuickConv2d, _is_pointwise)),
)


class QuickNet(Net):
    """A net that rounds the weights of its convolutions once for each pass."""

    def features(self, images: Tensor) -> Tensor:
        """As `Net.features`."""
        rounds = images.is_cuda and torch.is_autocast_enabled("cuda")
        with rounded_weights(self.body, torch.get_autocast_dtype("cuda") if rounds else None):
            return super().features(images)


quicken_nets = Replacement(QuickNet, exactly(Net))


@contextmanager
def rounded_weights(net: nn.Module, precision: torch.dtype | None) -> Iterator[None]:
    """Round the weights of the net's quick convolutions, if any, for the passes within; not for precision None."""
    layers = [module for module in net.modules() if isinstance(module, QuickConv2d)] if precision else []
    weights = RoundAll.apply(precision, *(layer.weight for layer in layers)) if layers else ()
    for layer, weight in zip(layers, weights):
        layer.rounded = weight
    try:
        yield
    finally:
        for layer in layers:
            layer.rounded = None


class RoundAll(torch.autograd.Function):
    """Some tensors in another precision, by a few kernels for all of them; gradients come back in their own."""

    @staticmethod
    def forward(ctx: Any, precision: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors, rounded."""
        ctx.set_materialize_grads(False)
        ctx.precision = tensors[0].dtype
        return tuple(_converted(tensors, precision))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Their gradients; None where none was needed."""
        given = [gradient for gradient in gradients if gradient is not None]
        if torch.is_grad_enabled():  # somebody wants gradients of these gradients
            found = iter([gradient.to(ctx.precision) for gradient in given])
        else:
            found = iter(_converted(given, ctx.precision))
        return None, *(None if gradient is None else next(found) for gradient in gradients)


def _converted(tensors: Sequence[Tensor], precision: torch.dtype) -> list[Tensor]:
    made = [torch.empty_like(tensor, dtype=precision) for tensor in tensors]
    if made:
        torch._foreach_copy_(made, list(tensors))
    return made
