"""Many tensors at once: on a GPU a few kernels in place of one for each.

Torch's `_foreach` functions do so for tensors of one type and layout only; these take any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def by_type(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors that have a type in common, in order."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    return list(places.values())


@torch.no_grad()
def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into its target, across devices, types and layouts."""
    alike = [
        place
        for place, (target, value) in enumerate(zip(into, values, strict=True))
        if target.is_cuda
        and (target.device, target.dtype, target.stride()) == (value.device, value.dtype, value.stride())
    ]
    for places in by_type([into[place] for place in alike]):
        torch._foreach_copy_([into[alike[p]] for p in places], [values[alike[p]] for p in places])
    for place in sorted(set(range(len(into))) - set(alike)):
        into[place].copy_(values[place], non_blocking=True)


def clone_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each tensor."""
    clones = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(clones, tensors)
    return clones


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether each tensor of floats holds neither NaN nor infinity (n,), on their device."""
    if not tensors[0].is_cuda:
        # A sum is finite unless an entry is not, or it overflows: one quick pass, and a look at those in doubt.
        finite = torch.isfinite(torch.stack([t.detach().sum(dtype=torch.float32) for t in tensors]))
        for place in (~finite).nonzero().flatten().tolist():
            finite[place] = tensors[place].isfinite().all()
        return finite
    sizes: list[Tensor] = [tensors[0]] * len(tensors)
    for places in by_type(tensors):
        norms = torch._foreach_norm([tensors[place].detach() for place in places], math.inf)
        for place, norm in zip(places, norms):
            sizes[place] = norm.float()
    return torch.isfinite(torch.stack(sizes))
