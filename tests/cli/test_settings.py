"""The reference of settings: complete, true to the models, and the committed page is what the code gives."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveFloat
from typer.testing import CliRunner

from equipoise.cli.app import app
from equipoise.cli.settings import NOT_SET, Key, Section, as_markdown, kind_in_words, sections
from equipoise.contract.config import Config
from equipoise.core.errors import UserError
from equipoise.methods import get_method, method_names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as {dotted key: value}."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values


def defaults() -> dict[str, Any]:
    """The default of every key that a config can have, as the models themselves give it."""
    general = flat(Config().model_dump(mode="json", exclude={"methods"}))
    options = {name: get_method(name).options().model_dump(mode="json") for name in method_names()}
    return general | flat(options)


def test_the_page_is_what_the_command_prints():
    printed = CliRunner().invoke(app, ["settings", "--markdown"]).output
    assert PAGE.read_text(encoding="utf-8") == printed, "run: equipoise settings --markdown > docs/settings.md"


def test_every_key_of_a_config_and_every_option_of_a_method_is_on_the_page():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [key for key in defaults() if sum(line.startswith(f"| `{key}` |") for line in lines) != 1] == []


def test_defaults_are_toml_and_those_of_the_models():
    keys = [key for section in sections() for key in section.keys]
    shown = {key.path: None if key.default == NOT_SET else tomllib.loads(f"x = {key.default}")["x"] for key in keys}
    assert shown == defaults()


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "true or false"),
        (Path | None, "path"),
        (PositiveFloat | None, "number, above 0"),
        (Annotated[int, Field(ge=2, le=8)], "whole number, at least 2 and at most 8"),
        (Literal["sgd", "adam", "none"], "sgd, adam or none"),
        (tuple[str, ...], "list (text)"),
        (tuple[PositiveFloat, PositiveFloat] | None, "list of 2 (number, above 0)"),
    ],
)
def test_types_are_told_in_words(annotation, words):
    assert kind_in_words(annotation) == words


def test_a_table_is_shown_with_the_tables_in_it_and_no_others():
    assert [section.name for section in sections("train")] == ["train", "train.optimiser", "train.schedule"]
    assert [section.name for section in sections("data.phantom")] == ["data.phantom"]
    output = CliRunner().invoke(app, ["settings", "prr"]).output
    assert "prr.det " in output and "train.participation" not in output


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("zzz", r"no table or key 'zzz'; tables: .*train\.optimiser, .*prr"),
        ("privcy", r"no table or key 'privcy'; did you mean 'privacy'\?$"),
        ("train.epoch", r"did you mean 'train.epochs'\?$"),
        ("fedavg", "method fedavg has no settings"),
    ],
)
def test_an_unknown_table_is_answered_with_the_one_that_was_meant_or_all(name, told):
    with pytest.raises(UserError, match=told):
        sections(name)


def test_a_key_is_shown_alone_with_the_methods_that_change_its_default():
    output = CliRunner().invoke(app, ["settings", "train.rounds"]).output
    assert "train.rounds " in output and "train.epochs" not in output
    assert "closed: train.rounds=1" in output and "feddyn" not in output
    assert {key.path for section in sections("epochs") for key in section.keys} >= {"train.epochs"}


def test_a_bar_in_a_meaning_does_not_end_its_cell():
    page = as_markdown([Section("net", "A net.", (Key("net.decay", "number", "0.1", "weight of |w|"),))])
    assert r"| `net.decay` | number | `0.1` | weight of \|w\| |" in page
