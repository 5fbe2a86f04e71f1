"""Check users' tables of settings; an error names the place and value of a mistake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from equipoise.core.errors import UserError
from equipoise.core.suggestions import meant

T = TypeVar("T", bound=BaseModel)

LONGEST_VALUE = 80
"""Characters of a wrong value that a message still shows."""


def validated(model: type[T], raw: Any, where: str) -> T:
    """`raw` as a table of this model; an error names the place and value of a mistake."""
    try:
        return model.model_validate(raw)
    except ValidationError as problem:
        lines = [f"  {': '.join([*_place(e), _explain(e, model)])}" for e in problem.errors()]
        raise UserError(f"{where} is not valid:\n" + "\n".join(lines)) from None


def _place(error: Any) -> list[str]:
    """Where a mistake is, entries of lists counted from 1; nothing for the whole."""
    keys = [f"{key + 1}" if isinstance(key, int) else str(key) for key in error["loc"]]
    return [".".join(keys)] if keys else []


def _explain(error: Any, model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        known, name = _keys_beside(model, error["loc"]), str(error["loc"][-1])
        close = meant(name, known)
        elsewhere = _place_of(model, error["loc"]) if close is None else None
        if close or elsewhere:
            return f"unknown key; did you mean '{close or elsewhere}'?"
        return "unknown key" + (f"; known are {', '.join(known)}" if known else ": there are no settings here")
    if error["type"] == "too_short" and error["input"]:  # another error names the wrong items
        return "nothing of it can be used"
    if error["type"] == "tuple_type" and isinstance(error["input"], dict):
        return f"expected a list of tables: [[{error['loc'][-1]}]]"
    if error["type"] == "tuple_type":
        return f"expected a list (got {error['input']!r})"
    message, given = str(error["msg"]).removeprefix("Value error, "), repr(error["input"])
    if isinstance(error["input"], dict) or len(given) > LONGEST_VALUE:  # a whole table would bury the message
        return message
    return f"{message} (got {given})"


def _keys_beside(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """The keys that a table has, by the place of any key in it."""
    table: Any = model
    for key in place[:-1]:
        if isinstance(key, str):
            field = table.model_fields.get(key) or next(f for f in table.model_fields.values() if f.alias == key)
            table = next(
                kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
            )
    # `methods` is where the tables of methods are put together; users never write it.
    return [field.alias or name for name, field in table.model_fields.items() if name != "methods"]


def _place_of(model: type[BaseModel], place: Sequence[str | int]) -> str | None:
    """The dotted name of a key that stands in another table than it was looked for; the closest table comes first."""
    *path, name = [str(key) for key in place]
    found = [key for key in _dotted_keys(model) if key.rpartition(".")[2] == name]
    return max(found, key=lambda key: sum(part in path for part in key.split(".")), default=None)


def _dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All keys of a table and of the tables in it."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = [kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        yield from _dotted_keys(inner[0], f"{key}.") if inner else (key,)


def _kinds(annotation: Any) -> Iterator[Any]:
    """A type and all that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)
