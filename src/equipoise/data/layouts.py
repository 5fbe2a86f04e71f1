"""What the folders of `folder:DIR` stand for: classes, sites and parts, at which level.

A layout is written as a path, such as `site/class`. Folders below the last level belong to the folder above them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import PurePath
from typing import Literal, get_args

from equipoise.core.errors import UserError, first_few

Layout = Literal["class", "split/class", "site/class", "site/split/class", "split/site/class"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
#: names of folders and values of columns that stand for a part
PARTS = {
    "train": "train", "training": "train",
    "valid": "valid", "val": "valid", "validation": "valid",
    "test": "test", "testing": "test",
}  # fmt: skip
#: the folder that macOS adds to zip files
ADDED = "__MACOSX"

#: the names of an image's folders, from the top
Folder = tuple[str, ...]


def is_ignored(name: str) -> bool:
    """Whether a folder holds no images of the user: a hidden one, or one that macOS added."""
    return name.startswith(".") or name == ADDED


def folder_of(root: PurePath, file: PurePath) -> Folder:
    """The names of the folders between `root` and a file."""
    return file.relative_to(root).parent.parts


def layout_of(root: PurePath, folders: Collection[Folder]) -> Layout:
    """The one layout that the folders with images can have.

    Raises:
        UserError: when they fit several layouts, or none
    """
    found = _possible(folders)
    if len(found) == 1:
        return found[0]
    if not found:
        parts = {name for folder in folders for name in folder[:2] if _is_part(name)}
        raise UserError(
            f"{root}: the folders {first_few(in_order(parts))} are named after parts, but the folders fit none of "
            f"{', '.join(f'{layout}/' for layout in LAYOUTS[1:])} (images lie in {_some(folders)}). Move the images, "
            "or write a manifest; --layout class (data.layout) takes the outermost folders as classes"
        )
    ways = " or ".join(f"{layout}/ ({_reading(layout, folders)})" for layout in found)
    options = " or ".join(f"--layout {layout}" for layout in found)
    raise UserError(f"{root}: the folders can be read as {ways}. {options} (data.layout) decides")


def levels(layout: Layout, root: PurePath, folder: Folder) -> dict[str, str]:
    """What a folder's names stand for under a layout: class, and site and split where the layout has them.

    Raises:
        UserError: when the folder does not fit the layout
    """
    kinds = layout.split("/")
    if len(folder) < len(kinds):
        raise UserError(
            f"{root}: the folder {'/'.join(folder)} holds images, but data.layout = {layout!r} needs {len(kinds)} "
            "levels of folders above an image; move them, or give another --layout"
        )
    named = dict(zip(kinds, folder))
    if "split" in named and named["split"].lower() not in PARTS:
        raise UserError(
            f"{root}: data.layout = {layout!r} takes the folder {'/'.join(folder[: kinds.index('split') + 1])} for a "
            f"part; call it train, valid or test"
        )
    return named


def summary(layout: Layout, named: Iterable[Mapping[str, str]]) -> str:
    """What a tree holds under a layout, in a few words."""
    found: dict[str, dict[str, None]] = {kind: {} for kind in layout.split("/")}
    for names in named:
        for kind, known in found.items():
            known[names[kind]] = None
    return ", ".join(_counted(kind, list(names)) for kind, names in found.items())


def in_order(names: Iterable[str]) -> list[str]:
    """Names as people count: 2 before 10, grade 2 before grade 10."""
    names = sorted(set(names))
    if all(re.fullmatch(r"[+-]?[0-9]+([.][0-9]+)?", name) for name in names):
        return sorted(names, key=float)
    return sorted(names, key=_chunks)


def _chunks(name: str) -> list[str | int]:
    """A name's texts and numbers, by turns."""
    return [int(chunk) if place % 2 else chunk for place, chunk in enumerate(re.split("([0-9]+)", name))]


def _possible(folders: Collection[Folder]) -> list[Layout]:
    tops = [_is_part(folder[0]) for folder in folders]
    if all(tops):
        if any(len(folder) == 1 for folder in folders):
            return []
        return [f"split/{rest}" for rest in _class_or_site({folder[1:] for folder in folders})]  # type: ignore[misc]
    if any(tops):
        return []
    seconds = [len(folder) > 1 and _is_part(folder[1]) for folder in folders]
    if all(seconds):
        return ["site/split/class"] if all(len(folder) > 2 for folder in folders) else []
    if any(seconds):
        return []
    return _class_or_site(folders)


def _is_part(name: str) -> bool:
    return name.lower() in PARTS


def _class_or_site(folders: Collection[Folder]) -> list[Layout]:
    """Whether the outer folders are classes or sites.

    Sites have inner folders of the same names, which are classes. Inner folders with numbers in their names may be
    patients or batches of a class.
    """
    if any(len(folder) == 1 for folder in folders):
        return ["class"]
    tops = {folder[0] for folder in folders}
    pairs = {folder[:2] for folder in folders}
    inner = {name for _, name in pairs}
    shared, numbered = len(pairs) > len(inner), any(re.search("[0-9]", name) for name in inner)
    if not numbered and (shared or len(tops) == 1):
        return ["site/class"]
    if numbered and not shared and len(tops) > 1:
        return ["class"]
    return ["class", "site/class"]


def _reading(layout: Layout, folders: Collection[Folder]) -> str:
    kinds = layout.split("/")
    return summary(layout, (dict(zip(kinds, folder)) for folder in folders))


def _counted(kind: str, names: list[str]) -> str:
    plural = {"class": "classes", "site": "sites", "split": "parts"}[kind] if len(names) != 1 else kind
    return f"{len(names)} {plural}: {first_few(in_order(names), 3)}"


def _some(folders: Collection[Folder]) -> str:
    return first_few(sorted("/".join(folder) for folder in folders), 3)
