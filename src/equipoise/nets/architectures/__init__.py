"""The nets that come with Equipoise, one file each; the file's name (with - for _) is the net's name.

Each file holds one `Architecture` as `NET`. Files that begin with _ hold shared code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from equipoise.core.definitions import module_names
from equipoise.core.errors import UserError

if TYPE_CHECKING:
    from equipoise.nets.net import Net


@dataclass(frozen=True)
class Architecture:
    """How a net is made, and where its first weights are published."""

    make: Callable[..., Net]
    """`make(num_classes, channels, dropout)` gives the net; it takes `drop_connect` too where that is not None."""
    dropout: float = 0.0
    """Share of features dropped before the head, as its authors have it."""
    drop_connect: float | None = None
    """Greatest chance of skipping a residual block, as its authors have it; None: the net skips none."""
    imagenet: str | Callable[[], Path] = ""
    """The address of weights from ImageNet, or a function that finds them in a package; empty: there are none."""
    published_name: Callable[[str], str] = str
    """The name of a tensor of the body in files of published weights; empty: they lack it, and it stays random."""
    dense: bool = False
    """Whether it gives a class for each pixel, for segmentation."""
    size: int = 0
    """Pixels per side that its weights were trained with; 0: those of the images."""
    normalise: Literal["imagenet", "half", "none"] = "imagenet"
    """How images are normalised for these weights."""
    configured: bool = False
    """Whether `make` takes the whole table `net` besides, as `config`."""


def dense_names(dense: bool = True) -> list[str]:
    """The nets of this package for segmentation, or all others."""
    return [name for name in net_names() if architecture(name).dense == dense]


def net_names() -> list[str]:
    """All nets of this package, in alphabetical order."""
    return sorted(name.replace("_", "-") for name in module_names(*__path__) if not name.startswith("_"))


def architecture(name: str) -> Architecture:
    """A net of this package by name."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    found = getattr(module, "NET", None)
    if not isinstance(found, Architecture):
        raise UserError(
            f"{module.__file__} defines no NET = Architecture(...); files whose names begin with _ need none"
        )
    return found
