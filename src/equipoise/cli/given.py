"""Options of commands on their way into a config. Loads nothing: the command line has to answer at once."""

from collections.abc import Iterable
from typing import Any

from equipoise.core.errors import UserError


def given(**values: Any) -> dict[str, Any] | None:
    """The options that the user gave, as a table of the config; None where there are none, and nothing is set."""
    return {name: value for name, value in values.items() if value is not None} or None


def pairs(option: str, texts: Iterable[str] | None) -> dict[str, str] | None:
    """The values of a repeatable option such as `--column label=dx`, by name; None where there are none."""
    found = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UserError(f"{option} {text}: expected name=value, for example {option} label=dx")
        found[name] = value
    return found or None
