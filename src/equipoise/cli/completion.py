"""What the shell offers after the tab key: names of methods, components, sources, presets and studies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from equipoise.core.definitions import PACKAGE, modules_in

#: modules among the components that are none
BASES = ("averaging",)


def methods(incomplete: str) -> list[str]:
    """Methods whose names begin so."""
    return _beginning(incomplete, modules_in("methods"))


def components(incomplete: str) -> list[str]:
    """A list of components between commas, the last of which is completed."""
    before, comma, last = incomplete.rpartition(",")
    names = [name for name in modules_in("components") if name not in BASES]
    return [before + comma + name for name in _beginning(last, names)]


def nets(incomplete: str) -> list[str]:
    """Nets whose names begin so; one from outside goes on with a name."""
    return _beginning(incomplete, (*modules_in("nets/architectures"), "monai:", "hf:"))


def sources(incomplete: str) -> list[str]:
    """Sources of data; one of the user's own images goes on with a path."""
    return _beginning(incomplete, (*modules_in("data/sources"), "folder:", "manifest:"))


def presets(incomplete: str) -> list[str]:
    """Presets whose names begin so; the shell completes files by itself."""
    return _beginning(incomplete, tables("contract/presets"))


def studies(incomplete: str) -> list[str]:
    """Studies whose names begin so, and the word for their list."""
    return _beginning(incomplete, ("list", *tables("studies/grids")))


def tables(folder: str) -> dict[str, Path]:
    """The TOML files of a folder of the package, by name."""
    return {path.stem: path for path in sorted((PACKAGE / folder).glob("*.toml"))}


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
