"""Activations that may be part of the batch norm before them, and what is put in their place in a net."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

#: the slope below zero of a leaky ReLU that the kernels know
LEAK = 0.2


class Follows(nn.Module):
    """An activation that leaves alone what the batch norm before it has activated."""

    def forward(self, values: Tensor) -> Tensor:
        """Values of any shape."""
        if not getattr(values, "activated", False):
            return super().forward(values)
        values.activated = False  # type: ignore[attr-defined] # an activation after this one has its own work to do
        return values


class QuickReLU(Follows, nn.ReLU):
    """ReLU."""


class QuickReLU6(Follows, nn.ReLU6):
    """ReLU, up to 6."""


class QuickSiLU(Follows, nn.SiLU):
    """SiLU, also called swish."""


class QuickLeakyReLU(Follows, nn.LeakyReLU):
    """ReLU that lets a part of negative values through."""


class Activation(NamedTuple):
    """A layer as torch has it, the one that takes its place, and what it does."""

    usual: type[nn.Module]
    quick: type[Follows]
    function: Callable[[Tensor], Tensor]


#: by the names that the kernels know them by
ACTIVATIONS = {
    "relu": Activation(nn.ReLU, QuickReLU, F.relu),
    "relu6": Activation(nn.ReLU6, QuickReLU6, F.relu6),
    "silu": Activation(nn.SiLU, QuickSiLU, F.silu),
    "leaky_relu": Activation(nn.LeakyReLU, QuickLeakyReLU, lambda values: F.leaky_relu(values, LEAK)),
}


def name_of(layer: nn.Module) -> str:
    """The name of a layer's activation, usual or quick already; nothing where the kernels have none like it."""
    if isinstance(layer, nn.LeakyReLU) and layer.negative_slope != LEAK:
        return ""
    return next((name for name, known in ACTIVATIONS.items() if type(layer) in (known.usual, known.quick)), "")
