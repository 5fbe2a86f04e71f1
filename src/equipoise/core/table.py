"""The base of every part of a config: what holds for all tables of a TOML file."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, field_validator

#: no number of a config is larger: single precision and 64-bit counters hold it, and what few steps make of it
LARGEST, LARGEST_COUNT = 1e30, 2**53


#: marks a setting that earlier versions did not have: at its default it does not count in a run's digest
LATER: Any = {"later": True}


class Table(BaseModel):
    """A table of the config: unknown keys are errors, numbers are finite, and values never change once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _sensible_numbers(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """Refuse `train.rounds = true`, which would count as one round, and numbers that arithmetic could not hold."""
        checked = check(value)
        if isinstance(value, bool) and type(checked) in (int, float):
            raise ValueError("Input should be a number")
        for number in checked if isinstance(checked, tuple) else (checked,):
            bound = {int: LARGEST_COUNT, float: LARGEST}.get(type(number))
            if bound is not None and abs(number) > bound:
                raise ValueError(f"Input should be at most {bound:.0e}" if bound == LARGEST else "Input is too large")
        return checked

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        """Settings that do nothing, and why; `setting` is that of the run, where it is known."""
        return {}


def drop_later(table: Table, dumped: dict[str, Any]) -> None:
    """Take settings that earlier versions did not have, and that are at their default, out of a dumped table."""
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if field.json_schema_extra == LATER and value == field.default:
            dumped.pop(name, None)
        elif isinstance(value, Table) and name in dumped:
            drop_later(value, dumped[name])


def written(table: Table) -> dict[str, Any]:
    """A table as a config file holds it: without settings that earlier versions did not have, at their defaults."""
    dumped = table.model_dump(mode="json", exclude_none=True)
    drop_later(table, dumped)
    return dumped


def tables_in(table: Table, prefix: str = "") -> Iterator[tuple[str, Table]]:
    """The tables within a table, at any depth, by their dotted names."""
    for name in type(table).model_fields:
        value = getattr(table, name)
        if isinstance(value, Table):
            yield f"{prefix}{name}", value
            yield from tables_in(value, f"{prefix}{name}.")


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as {dotted key: value}, the way `--set` names keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
