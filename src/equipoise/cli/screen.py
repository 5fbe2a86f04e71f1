"""What all commands share: the console, and help pages that begin with an example."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

console = Console()

#: columns of a terminal that has room for wider gaps in a table
ROOMY = 90
#: wider than any table
UNBOUNDED = 10_000
#: a word of so many letters is never folded
SHORT = 8
#: how a help text begins
EXAMPLE = "Example:"


class ExampleGroup(TyperGroup):
    """Commands whose help begins with an example; a list of them shows the sentence after it."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, with the first sentence of its help for lists."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help and not command.short_help:
            paragraphs = [text for text in command.help.split("\n\n") if not text.startswith(EXAMPLE)]
            command.short_help = paragraphs[0].replace("\n", " ") if paragraphs else None
        return command


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Table:
    """A table in which nothing is taken for markup and nothing is cut off.

    Where the screen is narrow, words fold before numbers do; the first column folds last.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 2 if console.width >= ROOMY else 1, 0, 0), pad_edge=False)
    for number, heading in enumerate(headings):
        column = [row[number] for row in cells]
        words = [word for cell in (heading, *column) for word in cell.split()]
        numbers = bool(column) and not any(mark.isalpha() for mark in "".join(column))
        least = min(max(map(len, words), default=0), SHORT)  # else a column with room for nothing vanishes
        shown.add_column(heading, no_wrap=number == 0 or numbers, overflow="fold", min_width=least)
    for row in cells:
        shown.add_row(*map(escape, row))
    if console.measure(shown, options=console.options.update(width=UNBOUNDED)).minimum > console.width:
        shown.padding = 0
    return shown


def first_sentence(text: str) -> str:
    """The first sentence of a text; "Eqs. 1" ends none."""
    return re.split(r"(?<!Eq)(?<!Eqs)\. ", text)[0].rstrip(".")


def say(text: str) -> None:
    """Print a line as it stands: names and paths may hold what rich takes for markup."""
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
