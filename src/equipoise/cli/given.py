"""Options of commands on their way into a config. Loads nothing: the command line has to answer at once."""

from typing import Any


def given(**values: Any) -> dict[str, Any] | None:
    """The options that the user gave, as a table of the config; None where there are none, and nothing is set."""
    return {name: value for name, value in values.items() if value is not None} or None
