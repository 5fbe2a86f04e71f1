"""Which layers of a net are used in one place alone: what stands beside them there is all that they meet."""

from __future__ import annotations

from collections import Counter

from torch import nn


def layers_of_one_place(net: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Every layer that is part of one module, once, with that module."""
    owned = [(owner, layer) for owner in net.modules() for layer in owner._modules.values() if layer is not None]
    places = Counter(id(layer) for _, layer in owned)
    return [(owner, layer) for owner, layer in owned if places[id(layer)] == 1]
