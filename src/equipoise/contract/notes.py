"""What methods and components write down of how they act: named small series and tables of a round.

A note keeps a tensor on its device. The engine reads it when the site's work is done: no step waits for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: numbers of one note
MOST_NUMBERS = 4096
#: digits that a log keeps
DIGITS = 4

Values = list[Any]
"""The notes of one name in a round, in order: numbers, or nested lists of numbers."""


class Notes:
    """The notes of one ask at a site, or of a round on the server."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Tensor]] = {}
        self.pictures: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        """Note a number, or a small tensor: (C,) is of classes, (C, K) of their sub-clusters."""
        tensor = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value))
        if tensor.numel() > MOST_NUMBERS:
            raise TypeError(f"the note '{name}' holds {tensor.numel()} numbers; {MOST_NUMBERS} at most are kept")
        self.kept.setdefault(name, []).append(tensor)

    def show(self, name: str, images: Tensor) -> None:
        """Keep a few images (n, C, H, W), from 0 to 1, for a file in the run's folder; the latest of a name stay."""
        self.pictures[name] = images.detach().clamp(0, 1)

    def taken(self) -> dict[str, Values]:
        """The notes as plain values; none are left."""
        kept, self.kept = self.kept, {}
        return {name: [_plain(own.float().cpu().tolist()) for own in tensors] for name, tensors in kept.items()}


def added(first: dict[str, Values], more: Mapping[str, Values]) -> None:
    """Put the notes of a further ask after those of the first."""
    for name, values in more.items():
        first.setdefault(name, []).extend(values)


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, list) else float(f"{value:.{DIGITS}g}")
