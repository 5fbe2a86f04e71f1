"""The reference of everything a config can say, read off its tables: what `equipoise settings` and
`docs/settings.md` show of each key."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from rich.padding import Padding
from rich.text import Text

from equipoise.contract.config import Config
from equipoise.core.definitions import PACKAGE, arguments, constant, modules_in
from equipoise.core.errors import UserError
from equipoise.core.suggestions import meant
from equipoise.core.table import Table, dotted

HEADINGS = ("key", "type", "default", "meaning")
PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
#: the attributes of a field's metadata that bound a number, and how to say so
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
NOT_SET = "not set"


@dataclass(frozen=True)
class Key:
    """One key of a config: how users write it, its type in words, its default as TOML, and what it means."""

    path: str
    kind: str
    default: str
    meaning: str

    def cells(self) -> tuple[str, str, str, str]:
        """The key in the order of `HEADINGS`."""
        return self.path, self.kind, self.default, self.meaning


@dataclass(frozen=True)
class Section:
    """A table of a config, by its dotted name ("" at the top), with the keys that are not tables themselves."""

    name: str
    about: str
    keys: tuple[Key, ...]


def sections(table: str | None = None) -> list[Section]:
    """The tables of a config and then those of the methods that have options; all, or one with the tables in it.

    The name of a key ("train.epochs", or "epochs") stands for the keys of this name alone.

    Raises:
        UserError: when there is no table and no key of this name
    """
    options = {name: method["options"] for name, method in _methods().items() if "options" in method}
    everything = [
        *_sections("", Config, left_out=("methods", "plugins")),
        *(section for name, model in options.items() for section in _sections(name, model)),
    ]
    if table is None:
        return everything
    chosen = [section for section in everything if section.name == table or section.name.startswith(f"{table}.")]
    if not chosen and table in modules_in("components"):
        from equipoise.components import get_component

        return list(_sections(table, get_component(table)))
    if chosen:
        return chosen
    named = {s: tuple(key for key in s.keys if f".{key.path}".endswith(f".{table}")) for s in everything}
    if table in _methods():
        raise UserError(f"the method {table} has no settings; `equipoise settings` shows the common ones")
    if not any(named.values()):
        names = [section.name for section in everything if section.name]
        known = [*names, *(key.path for section in everything for key in section.keys)]
        hint = f"did you mean '{close}'?" if (close := meant(table, known)) else f"tables: {', '.join(names)}"
        raise UserError(f"there is no table or key '{table}'; {hint}")
    return [replace(section, keys=keys) for section, keys in named.items() if keys]


def notes(shown: Iterable[Section]) -> Iterator[str]:
    """What a list of defaults cannot say: where those that are shown depend on the method or the data."""
    paths = {key.path for section in shown for key in section.keys}
    by_method = {
        name: {key: value for key, value in dotted(method["defaults"]).items() if key in paths}
        for name, method in _methods().items()
        if "defaults" in method
    }
    implied = [
        f"{name}: {', '.join(f'{key}={json.dumps(value)}' for key, value in defaults.items())}"
        for name, defaults in by_method.items()
        if defaults
    ]
    if implied:
        yield f"Defaults that come with a method: {'; '.join(implied)}."
    yield "Options of a component: `equipoise components show NAME`."
    if "net.name" in paths:
        pixels = constant(PACKAGE / "engine" / "runs.py", "SMALL_PIXELS")
        yield f"Without net.name, images of more than {pixels} pixels a side are trained with resnet18."


@cache
def _methods() -> dict[str, dict[str, Any]]:
    """What the files of the methods say of each, among it the table of its options and its defaults."""
    return {name: arguments(path, "METHOD", options=True) for name, path in modules_in("methods").items()}


def as_lines(chosen: Iterable[Section]) -> Iterator[Text | Padding]:
    """The keys for a terminal of any width: each with its type and default, and below them its meaning."""
    for section in chosen:
        for key in section.keys:
            default = "" if key.default == NOT_SET else f"; default {key.default}"
            yield Text.assemble((key.path, "bold"), f"  {key.kind}{default}")
            yield Padding(Text(key.meaning), (0, 0, 0, 4))


def as_markdown(chosen: Sequence[Section]) -> str:
    """The keys as a page, a heading and a table for each section."""
    lines = [
        "# Settings",
        "",
        "Written by `equipoise settings --markdown`. A key stands in its table of a TOML file (`lr = 0.1` under",
        "`[train.optimiser]`) or on the command line (`--set train.optimiser.lr=0.1`). The table of a method has the",
        "method's name; a general table inside it (`[fednpr.npr]`) holds for runs of that method alone.",
        "",
        *(f"- {note}" for note in notes(chosen)),
    ]
    for section in chosen:
        title = f"`[{section.name}]`" if section.name else "At the top"
        lines += ["", f"## {title}", "", section.about, "", _row(HEADINGS), _row(["---"] * len(HEADINGS))]
        for key in section.keys:
            lines.append(_row([f"`{key.path}`", key.kind, _code(key.default), key.meaning]))
    return "\n".join(lines) + "\n"


def _sections(name: str, table: type[Table], left_out: Sequence[str] = ()) -> Iterator[Section]:
    """A table, and the tables in it."""
    fields = {key: field for key, field in table.model_fields.items() if key not in left_out}
    inner = {key: model for key, field in fields.items() if _is_table(model := field.annotation)}
    prefix = f"{name}." if name else ""
    keys = tuple(_key(f"{prefix}{key}", field) for key, field in fields.items() if key not in inner)
    yield Section(name, " ".join((inspect.getdoc(table) or "").partition("\n\n")[0].split()), keys)
    for key, model in inner.items():
        yield from _sections(f"{prefix}{key}", model)


def _is_table(annotation: Any) -> TypeGuard[type[Table]]:
    return inspect.isclass(annotation) and issubclass(annotation, Table)


def _key(path: str, field: FieldInfo) -> Key:
    default = field.get_default(call_default_factory=True)
    shown = NOT_SET if default is None else json.dumps(default)
    meaning = " ".join((field.description or "").split())
    return Key(path, kind_in_words(field.annotation, field.metadata), shown, meaning)


def kind_in_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that a key takes. That an optional key may be left out is for its default to say.

    >>> kind_in_words(tuple[Literal["mean", "sum"], ...])
    'list (mean or sum)'
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        more = (bound for item in inner[1:] for bound in (item.metadata if isinstance(item, FieldInfo) else [item]))
        return kind_in_words(inner[0], [*metadata, *more])
    if origin in (Union, UnionType):
        return " or ".join(kind_in_words(choice, metadata) for choice in inner if choice is not NoneType)
    if origin is Literal:
        *first, last = map(str, inner)
        return f"{', '.join(first)} or {last}" if first else last
    if origin is dict:
        return "table"
    if origin is tuple:
        length = "" if inner[-1] is Ellipsis else f" of {len(inner)}"
        return f"list{length} ({kind_in_words(inner[0])})"
    bounds = ((say, getattr(item, name, None)) for item in metadata for name, say in BOUNDS.items())
    limits = [f"{say} {bound:,}" for say, bound in bounds if bound is not None]
    return PLAIN[annotation] + (f", {' and '.join(limits)}" if limits else "")


def _row(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _code(default: str) -> str:
    return default if default == NOT_SET else f"`{default}`"
