"""Updates in fewer bits: a site sends by how much weights changed, rounded, and keeps the rounding error.

It adds the error to its next update (error feedback; Seide et al., 2014; Karimireddy et al., 2019). So the sum of all
received updates differs from the sum of all updates by the last error only, for any number of rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equipoise.contract.protocol import Tensors, Value, flatten
from equipoise.hospitals.parcels import Contents, UnreadableParcel, prepare, tensor_digest, widened

#: form of sent updates: full, or as changes in 16 or 8 bits
WIRES = ("fp32", "fp16", "int8")
LARGEST = 127
#: where a site's kept tensors hold rounding errors
RESIDUAL = "wire residual/"


def compress(
    payload: Mapping[str, Value], received: Mapping[str, Value], wire: str, residuals: Mapping[str, Tensor]
) -> tuple[Contents, Tensors]:
    """A reply with its weights as rounded changes of those that were received, and the new residuals by name.

    Weights here have two or more axes and lie in a dict that the message has, too. Biases, statistics of norms and
    tensors that stand alone are few numbers, of which some must stay positive: they travel unrounded.
    """
    if wire not in WIRES:
        raise UnreadableParcel(f"weights are to travel as '{str(wire)[:20]}', which this version does not know")
    own, sent = flatten(payload)[0], flatten(received)[0]
    changed = {name: tensor for name, tensor in own.items() if _is_weight(name, tensor, sent.get(name))}
    rest: dict[str, Any] = {
        name: {key: t for key, t in value.items() if f"{name}/{key}" not in changed}
        if isinstance(value, Mapping)
        else value
        for name, value in payload.items()
    }
    contents = prepare(rest)
    entries, tensors, errors = {}, dict(contents.tensors), dict[str, Tensor]()
    for name in own:
        if name not in changed:
            entries[name] = contents.entries[name]
            continue
        change = own[name].detach().cpu() - sent[name].detach().cpu()
        if name in residuals and residuals[name].shape == change.shape:
            change += residuals[name]
        packed, scale = rounded(change, wire)
        errors[name] = change - widened(packed, scale)
        entries[name] = {"dtype": "float32", "change": wire}
        for key, tensor in (("digest", packed), ("scale", scale)):
            if tensor is not None:
                entries[name][key] = tensor_digest(tensor)
                tensors[entries[name][key]] = tensor
    return Contents(entries, flatten(payload)[1], tensors), errors


def rounded(change: Tensor, wire: str) -> tuple[Tensor, Tensor | None]:
    """A change in 16 bits, or in 8 with a factor for each row; an error of 8 bits is half a factor at most."""
    if wire == "fp16":
        largest = torch.finfo(torch.float16).max
        return change.clamp(-largest, largest).half().contiguous(), None
    rows = change.flatten(1)
    scale = rows.abs().amax(1) / LARGEST
    steps = rows / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    return steps.round().clamp(-LARGEST, LARGEST).to(torch.int8).view(change.shape), scale


def without_residuals(state: Tensors | None) -> Tensors | None:
    """What a site keeps for its method; None where it keeps rounding errors alone."""
    kept = {name: tensor for name, tensor in (state or {}).items() if not name.startswith(RESIDUAL)}
    return state if not state or len(kept) == len(state) else kept or None


def residuals_of(state: Tensors | None, action: str) -> Tensors:
    """The rounding errors of an action's earlier reply, by name."""
    start = f"{RESIDUAL}{action}/"
    return {name.removeprefix(start): t for name, t in (state or {}).items() if name.startswith(start)}


def with_residuals(kept: Tensors | None, before: Tensors | None, action: str, errors: Tensors) -> Tensors | None:
    """A site's next state: what its method keeps, and the rounding errors of every action."""
    start = f"{RESIDUAL}{action}/"
    fresh = {f"{start}{name}": tensor for name, tensor in errors.items()}
    old = {name: t for name, t in (before or {}).items() if name.startswith(RESIDUAL) and name not in fresh}
    if kept is None and not fresh:
        return None  # nothing has changed
    own = kept if kept is not None else without_residuals(before) or {}
    return {**own, **old, **fresh}


def _is_weight(name: str, tensor: Tensor, sent: Tensor | None) -> bool:
    return (
        "/" in name
        and sent is not None
        and tensor.dtype == sent.dtype == torch.float32
        and tensor.shape == sent.shape
        and tensor.dim() > 1
        and tensor.numel() > 0
    )
