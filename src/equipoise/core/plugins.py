"""Plug-ins: what users bring of each kind, under which names, where it comes from, and the hash of its source.

A plug-in is an object from Python, `path/file.py[:NAME]`, `package.module[:NAME]`, or an entry point of an installed
package (`equipoise.methods` and so on). `find` turns each of these names into the object.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from equipoise.core import outside
from equipoise.core.definitions import modules_in, summary
from equipoise.core.errors import UserError
from equipoise.core.outside import GIVEN, is_outside

#: {kind: the group of its entry points}; a file calls its plug-in by the kind's name in capitals
GROUPS = {
    "method": "equipoise.methods",
    "component": "equipoise.components",
    "net": "equipoise.nets",
    "source": "equipoise.sources",
    "loss": "equipoise.losses",
    "metric": "equipoise.metrics",
}
#: beginnings of names that have a colon, and are no plug-ins
BUILT_IN_PREFIXES = {"net": ("monai", "hf")}
#: the folders of the kinds whose built-in names are files
FOLDERS = {"method": "methods", "component": "components", "net": "nets/architectures", "source": "data/sources"}
#: how `package.module[:NAME]` and `file.py[:NAME]` look
CODE = re.compile(r"(?:.+\.py(?::[\w.]+)?|[^\W\d]\w*(?:\.[^\W\d]\w*)+|[^\W\d][\w.]*:[^\W\d][\w.]*|python:.+)")


@dataclass(frozen=True)
class Plugin:
    """A plug-in of a run.

    Args:
        origin: its file, its package with the version, or "given from Python"
        digest: sha256 of its source file; of an object from Python, of its code
    """

    kind: str
    name: str
    origin: str
    digest: str


@cache
def _built_in(kind: str) -> frozenset[str]:
    return frozenset(modules_in(FOLDERS[kind])) if kind in FOLDERS else frozenset()


@cache
def _entries(kind: str) -> dict[str, EntryPoint]:
    """The entry points of a kind; built-in names keep their meaning."""
    return {entry.name: entry for entry in entry_points(group=GROUPS[kind]) if entry.name not in _built_in(kind)}


def entry_names(kind: str) -> list[str]:
    """The names of plug-ins that installed packages announce, in alphabetical order."""
    return sorted(_entries(kind))


def announced(kind: str) -> list[tuple[str, str, str]]:
    """The plug-ins that installed packages announce: name, package with version, and the first line of the file.

    Nothing is imported: a list must not wait for torch.
    """
    found = []
    for name, entry in sorted(_entries(kind).items()):
        origin, told = entry.module, ""
        if entry.dist is not None:
            origin = f"{entry.dist.name} {entry.dist.version}"
            file = Path(str(entry.dist.locate_file(f"{entry.module.replace('.', '/')}.py")))
            told = summary(file) if file.is_file() else ""
        found.append((name, origin, told))
    return found


def is_plugin(kind: str, name: str) -> bool:
    """Whether a name leads out of this package, for a kind of plug-in."""
    prefix = name.partition(":")[0]
    if name in _built_in(kind) or prefix in BUILT_IN_PREFIXES.get(kind, ()):
        return False
    if name in _entries(kind):
        return True
    if kind == "source":
        return prefix not in _built_in(kind) and bool(CODE.fullmatch(name)) and not _is_data(name)
    return is_outside(name)


def _is_data(name: str) -> bool:
    """Whether a name is that of a list or a folder of images, which lacks its prefix."""
    return name.lower().endswith(".csv") or Path(name).is_dir() or (Path(name).is_file() and not name.endswith(".py"))


def find(kind: str, name: str) -> Any:
    """The object behind the name of a plug-in."""
    return outside.find(_written(kind, name), kind.upper())


def _written(kind: str, name: str) -> str:
    """A name as `outside.find` takes it: entry points by their module."""
    entry = _entries(kind).get(name)
    return name if entry is None else entry.value.replace(" ", "")


def described(kind: str, name: str) -> Plugin:
    """Where a plug-in comes from, and its hash; its own module is not run for that."""
    if name.startswith(GIVEN):
        return Plugin(kind, name, "given from Python", name.rpartition("-")[2])
    file = outside.source_file(_written(kind, name))
    entry = _entries(kind).get(name)
    origin = str(file) if entry is None or entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return Plugin(kind, name, origin, hashlib.sha256(file.read_bytes()).hexdigest())


def named(given: Any, *code: Any, home: Any = None, title: str = "") -> str:
    """The name of an object that Python gives, as configs hold it.

    An object that a module holds gets a name that every process can look up. All others are known to this process.

    Args:
        code: functions and classes that define the object; by default the object itself
        home: what tells the object's module; by default the first of them
        title: what the object is called; by default its own name
    """
    code = code or (given,)
    module = getattr(home or code[0], "__module__", "")
    for name, value in outside.contents(module):
        if value is given and outside.reachable(given, module, name):
            return f"{module}:{name}"
    title = title or str(getattr(given, "__name__", type(given).__name__)).strip("<>")
    return outside.give(title, given, outside.code_digest(*code))


def check_unchanged(now: Plugin, recorded: str) -> None:
    """Refuse a plug-in whose source is another than the one that was recorded."""
    if now.digest != recorded:
        raise UserError(
            f"the {now.kind} {now.name} has changed: its hash is {now.digest[:12]}, and the config records "
            f"{recorded[:12]}; restore its file, or remove the table [plugins] from the config to run the changed file"
        )
