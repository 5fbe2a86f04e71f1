"""`equipoise audit`: how well a run's models tell which images they were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from equipoise.cli.screen import console, say


def audit(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder")],
    shadows: Annotated[int, typer.Option(help="shadow runs, each as long as the run itself")] = 16,
    seed: Annotated[int, typer.Option(help="random seed of the shadow runs")] = 1,
    as_csv: Annotated[bool, typer.Option("--csv", help="as CSV, for other programs")] = False,
) -> None:
    """Example: equipoise audit runs/mine --shadows 16

    Attack a run's models by membership inference (LiRA), for each class from the rarest on, and for each site.
    """
    from equipoise.api import frames
    from equipoise.engine.auditing import FILE, audit

    with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as progress:
        done = progress.add_task("shadow runs", total=shadows)
        found = audit(run_folder, shadows, seed, lambda number: progress.update(done, completed=number))
    if as_csv:
        typer.echo(frames.attacks(found).to_csv(index=False), nl=False)
        return
    columns = (Column("images of", overflow="fold"), "trained on", "others", "AUC", "found, %")
    table = Table(*columns, box=SIMPLE_HEAD, title=f"membership inference, {shadows} shadow runs")
    for group in found["groups"]:
        name = group["name"] if group["scope"] == "all" else f"{group['scope']} {group['name']}"
        numbers = (str(group["members"]), str(group["others"]))
        table.add_row(escape(name), *numbers, _interval(group["auc"], 1, 2), _interval(group["found"], 100, 0))
    console.print(table)
    say(
        "AUC 0.5 is chance. Found: share of training images found at a false alarm rate of 1 %; chance is 1 %. In "
        f"brackets: 95 % intervals over images. Written to {run_folder / FILE}"
    )


def _interval(values: list[float | None], scale: int, digits: int) -> str:
    if values[0] is None:
        return "-"
    value, low, high = (scale * number for number in values if number is not None)
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
