"""Commands for authors: `equipoise new` writes a plug-in with its test, `equipoise check` tries one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from equipoise.cli.screen import console, say
from equipoise.core.errors import UserError
from equipoise.core.storage import write_text

Kind = Literal["method", "component", "net", "source", "loss", "metric"]


def new(
    kind: Annotated[Kind, typer.Argument(help="what to write")],
    name: Annotated[str, typer.Argument(help="its name: letters, digits, _")],
    folder: Annotated[Path, typer.Option(help="where to write it")] = Path(),
) -> None:
    """Example: equipoise new method fedmine

    Write a plug-in that runs at once, and its test.
    """
    from equipoise.cli.templates import RUNS, test_of, text_of

    stem = name.replace("-", "_").lower()
    if not stem.isidentifier():
        raise UserError(f"{name!r} is no name for a Python file; use letters, digits and _")
    file, test = folder / f"{stem}.py", folder / f"test_{stem}.py"
    for path in (file, test):
        if path.exists():
            raise UserError(f"{path} exists; choose another name, or another --folder")
    write_text(file, text_of(kind, stem))
    write_text(test, test_of(kind, stem))
    say(f"{file}: run it: equipoise run {RUNS[kind]} {file}".replace("= ", "="))
    say(f"{test}: what it must keep: equipoise check {file}, or pytest {test}")


def check(
    name: Annotated[str, typer.Argument(metavar="FILE", help="file.py or package.module")],
    flower: Annotated[bool, typer.Option(help="also a round between processes on Flower")] = True,
) -> None:
    """Example: equipoise check my_method.py

    Try on a plug-in what every method keeps: resume, workers, replies, lost sites, NaN, host reads, a round on Flower.
    It is also tried with privacy.least, secure sums and differential privacy, and on images with masks.

    Exit code 1: something is not kept.
    """
    from equipoise.checks.battery import CHECKS, check_flower, findings
    from equipoise.checks.subjects import subjects_of

    titles = [title for title, found in CHECKS.items() if flower or found is not check_flower]
    broken = 0
    for kind, subject in [*subjects_of(name)]:
        subject.config()  # what is wrong with the file itself is the user's mistake
        say(f"the {kind} in {name}:")
        with tempfile.TemporaryDirectory() as folder:
            for finding in findings(subject, Path(folder), titles):
                mark = "[green]ok[/]    " if finding.kept else "[red]broken[/]"
                told = f": {finding.told}" if finding.told else ""
                console.print(f"  {mark} {escape(finding.title + told)}", highlight=False, soft_wrap=True)
                broken += not finding.kept
    if broken:
        raise typer.Exit(1)
