"""The tensors that a client declares: what outlives an ask, what a message fills, and what starts anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from equipoise.contract.bulk import copy_all
from equipoise.contract.protocol import Tensors, Value

Role = Literal["kept", "received", "scratch"]


@dataclass
class _Declared:
    role: Role
    tensors: Tensors
    remembered: bool
    """Whether an ask that brings no value starts from the first value; otherwise from NaN."""
    initial: Tensors = field(default_factory=dict)


class DeclaredTensors:
    """All tensors that the hooks of a client may read, by the name under which they were declared."""

    def __init__(self, owner: str):
        self.owner = owner
        self._entries: dict[str, _Declared] = {}

    def add(self, role: Role, name: str, target: Tensor | nn.Module, entries: Iterable[str] | None = None) -> None:
        """Declare a tensor, or entries of a module (all by default). A kept module has a separate value. So has every
        tensor that is not received."""
        if name in self._entries:
            raise TypeError(f"{self.owner} declares '{name}' twice")
        if isinstance(target, nn.Module):
            state = target.state_dict(keep_vars=True)
            chosen = state if entries is None else {entry: state[entry] for entry in entries}
            self._entries[name] = _Declared(role, dict(chosen), remembered=role == "kept")
        else:
            self._entries[name] = _Declared(role, {"": target}, remembered=role != "received")

    def add_optimiser(self, role: Role, phase: str, state: Tensors) -> None:
        """Declare the state of a phase's optimiser, in place of one that a parent class declared for this phase."""
        self._entries[f"optimiser.{phase}"] = _Declared(role, state, remembered=True)

    def check(self, attributes: Mapping[str, object]) -> None:
        """Refuse a client that holds a tensor which is not declared."""
        known = {id(tensor) for tensor in self.tensors()}
        for attribute, value in attributes.items():
            loose = value.state_dict(keep_vars=True) if isinstance(value, nn.Module) else {}
            loose = {"": value} if isinstance(value, Tensor) else loose
            for entry, tensor in loose.items():
                if id(tensor) not in known:
                    where = f"{self.owner}.{attribute} {entry}".strip()
                    raise TypeError(f"{where} is not declared (keeps, receives, scratch)")

    def remember(self) -> None:
        """Note first values."""
        for declared in self._entries.values():
            if declared.remembered:
                declared.initial = {entry: t.detach().clone() for entry, t in declared.tensors.items()}

    @torch.no_grad()
    def fill(self, message: Mapping[str, Value], kept: Mapping[str, Tensor] | None) -> None:
        """Give every tensor its value for one ask, from the message and from what the site kept."""
        into: list[Tensor] = []
        values: list[Tensor] = []
        for name, declared in self._entries.items():
            received = message.get(name) if declared.role == "received" else None
            for entry, tensor in declared.tensors.items():
                if declared.role == "received":
                    value = received.get(entry) if isinstance(received, Mapping) else received
                elif declared.role == "kept" and kept is not None:
                    value = kept[f"{name}/{entry}"]
                else:
                    value = declared.initial.get(entry)
                if value is None:
                    _poison(tensor)
                else:
                    into.append(tensor)
                    values.append(torch.as_tensor(value))
        copy_all(into, values)

    def kept(self) -> Tensors:
        """The tensors that outlive an ask, by flat name; references, not copies."""
        return {
            f"{name}/{entry}": tensor.detach()
            for name, declared in self._entries.items()
            if declared.role == "kept"
            for entry, tensor in declared.tensors.items()
        }

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [tensor for declared in self._entries.values() for tensor in declared.tensors.values()]


def _poison(tensor: Tensor) -> None:
    """Make use of a value that was never given visible: NaN, the lowest integer, or False."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(False)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
