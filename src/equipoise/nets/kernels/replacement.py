"""How quick layers take the place of torch's in a net, and which images they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from equipoise.nets.kernels.proof import Kernels

Find = Callable[[nn.Module], Iterable[nn.Module]]
Layer = TypeVar("Layer", bound=nn.Module)


@dataclass(frozen=True)
class Replacement:
    """Puts layers of class `quick` in the place of some layers of a net.

    Names and values of the net's state stay the same. Without proven kernels the net stays as torch has it.
    """

    quick: type[nn.Module]
    find: Find
    """The layers to replace. They become instances of `quick`, a subclass of their class or of `nn.Conv2d`."""
    kernels: Kernels | None = None
    """The kernels that quick layers call, if any."""
    settle: Callable[[nn.Module], None] | None = None
    """Called with the net after a replacement."""

    def __call__(self, net: nn.Module) -> None:
        """Replace layers of the net."""
        layers = list(self.find(net))
        if not layers or (self.kernels is not None and not self.kernels.usable()):
            return
        for layer in layers:
            layer.__class__ = self.quick
        if self.settle is not None:
            self.settle(net)


def exactly(kind: type[Layer], wanted: Callable[[Layer], bool] | None = None) -> Find:
    """Finds a net's layers of this very class, if `wanted` holds for them; layers of subclasses stay."""
    return lambda net: [layer for layer in net.modules() if type(layer) is kind and (wanted is None or wanted(layer))]


def layers_of_one_place(net: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Every layer that belongs to exactly one module, with that module: no other place in the net calls the layer."""
    owned = [(owner, layer) for owner in net.modules() for layer in owner._modules.values() if layer is not None]
    places = Counter(id(layer) for _, layer in owned)
    return [(owner, layer) for owner, layer in owned if places[id(layer)] == 1]


def suits(images: torch.Tensor) -> bool:
    """Whether images (B, C, H, W) are in the form that kernels read: bfloat16, channels last, on a GPU."""
    quick = images.is_cuda and images.dtype == torch.bfloat16
    return quick and images.is_contiguous(memory_format=torch.channels_last)
