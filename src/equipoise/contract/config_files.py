"""Configs from TOML files, presets and `key=value` settings."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from equipoise.contract.config import Config
from equipoise.core.errors import UserError, parse_toml
from equipoise.core.suggestions import meant_or_all
from equipoise.core.table import Table
from equipoise.core.validation import validated


def parse_config(raw: Mapping[str, Any], tables: Mapping[str, type[Table]], where: str = "config") -> Config:
    """Validate a raw config; `tables` maps the name of each method's option table to its model."""
    general = {key: value for key, value in raw.items() if key not in tables}
    methods = {}
    for key in raw.keys() & tables.keys():
        methods[key] = validated(tables[key], raw[key], f"{where}: [{key}]").model_dump(mode="json", exclude_unset=True)
    if "methods" in general:
        raise UserError(f"{where}: unknown key 'methods'; write a table named after the method, like [fedprox]")
    return validated(Config, {**general, "methods": dict(sorted(methods.items()))}, where)


def preset_names() -> list[str]:
    """The presets shipped with the package."""
    folder = resources.files(__package__) / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_raw(source: str | None) -> dict[str, Any]:
    """The raw tables of a preset name or a TOML file; nothing: an empty config."""
    if source is None:
        return {}
    if source in preset_names():
        content = (resources.files(__package__) / "presets" / f"{source}.toml").read_bytes()
    elif Path(source).is_file():
        content = Path(source).read_bytes()
    else:
        raise UserError(f"'{source}' is neither a file nor a preset; {meant_or_all(source, preset_names(), 'presets')}")
    tables = parse_toml(content, source)
    if {"row", "seeds"} & tables.keys():
        raise UserError(f"{source} is a study of several runs; start it with: equipoise study {source}")
    return tables


def override(raw: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply `key=value` settings (`train.optimiser.lr=0.1`); values are TOML, or else plain strings."""
    merged = copy.deepcopy(raw)
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise UserError(f"--set {setting!r}: expected key=value, for example train.epochs=2")
        table = merged
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise UserError(f"--set {setting!r}: '{key}' is a value, not a table")
        table[keys[-1]] = _toml_value(text.strip())
    return merged


def _toml_value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if found.keys() == {"value"} else text
