"""Entries of a module's state: taken for a reply, or copied into another module."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from equipoise.contract.bulk import copy_all
from equipoise.contract.protocol import Tensors


def share(module: nn.Module, entries: Iterable[str] | None = None) -> Tensors:
    """Entries of a module's state, for a reply; without names all."""
    state = module.state_dict()
    return dict(state) if entries is None else {entry: state[entry] for entry in entries}


@torch.no_grad()
def copy_entries(source: nn.Module, target: nn.Module, entries: Iterable[str] | None = None) -> None:
    """Copy a module's state into another of the same shape, in place; without names all of it."""
    from_state, to_state = source.state_dict(), target.state_dict()
    names = list(to_state) if entries is None else list(entries)
    copy_all([to_state[n] for n in names], [from_state[n] for n in names])
