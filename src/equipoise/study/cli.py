"""`equipoise study FILE`: run what a study lacks and write its tables; `equipoise study list` shows what there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from equipoise.errors import UserError
from equipoise.report.tables import METRIC_TITLES
from equipoise.study.config import StudyConfig, cell_config, check_different, grid, load_study, study_names
from equipoise.study.progress import GridProgress
from equipoise.study.report import write_study
from equipoise.study.results import RowResult, StudyResults, collect
from equipoise.study.runner import Outcome, run_grid
from equipoise.study.tables import cell, notes

console = Console()


def study(
    source: Annotated[str, typer.Argument(metavar="FILE", help="a study's name or TOML file; `list`: name them")],
    out: Annotated[Path, typer.Option(help="the study gets a folder of its name in here")] = Path("studies"),
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    together: Annotated[int, typer.Option(min=1, help="runs that share the device in this process")] = 1,
    workers: Annotated[int | None, typer.Option(min=1, help="worker processes of each run on a CPU")] = None,
    only: Annotated[list[str] | None, typer.Option(help="rows to run, comma separated; repeatable")] = None,
    seeds: Annotated[str | None, typer.Option(help="seeds to run instead of the file's, comma separated")] = None,
    full: Annotated[bool, typer.Option("--full", help="the full grid, with what the file keeps for later")] = False,
    limit_seconds: Annotated[
        float | None, typer.Option(min=0, help="stop in time, after a saved round; call again to go on")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="any config value, key=value; repeatable")] = None,
    keep: Annotated[bool, typer.Option("--keep-checkpoints", help="also of finished runs")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="run nothing, write anew")] = False,
) -> None:
    """Run the grid of a study, go on where it stopped, and write its tables, statistics and report."""
    if source == "list":
        list_studies()
        return
    config = load_study(source)
    folder = out / config.name
    outcome = Outcome()
    if not report_only:
        over = [f"compute.device={device}"] if device else []
        over += [f"compute.workers={workers}"] if workers else []
        cells = grid(config, folder, _rows(config, only), _numbers(seeds), full)
        if not cells:
            raise UserError("no run is chosen: these rows are kept for the full grid; add --full, or --seeds")
        planned = [(cell, cell_config(config, cell, [*over, *(settings or [])])) for cell in cells]
        with GridProgress(console, planned) as display:
            outcome = run_grid(planned, display, together, limit_seconds, keep)
    results = collect(config, folder)
    if results.runs:  # otherwise tables that are there, from runs that are elsewhere, stay as they are
        write_study(results, folder)
        print_tables(results)
    elif report_only:
        raise UserError(f"{folder} holds no finished run of {config.name}: nothing was written")
    if outcome.stopped:
        open_runs = "1 run is" if len(outcome.stopped) == 1 else f"{len(outcome.stopped)} runs are"
        console.print(f"{open_runs} not finished: the same command goes on", highlight=False)
    if results.runs:
        console.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    outcome.complain()


def _rows(config: StudyConfig, asked: Sequence[str] | None) -> list[str] | None:
    """The names of rows that were asked for, each by itself or between commas, which a name may have too."""
    known = {row.name for row in config.rows}
    parts = [[text] if text in known else text.split(",") for text in asked or ()]
    return [name.strip() for part in parts for name in part] or None


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds {text!r}: expected numbers, for example 1,2,3") from None
    try:
        check_different(numbers, "--seeds")
    except ValueError as problem:
        raise UserError(str(problem)) from None
    return numbers


def list_studies() -> None:
    """Name the studies that come with the package, with their runs: those of the first wave, and all."""
    table = Table("study", "what it is", "rows", "runs", "in full", box=SIMPLE_HEAD)
    for name in study_names():
        found = load_study(name)
        first, everything = (len(grid(found, Path(), full=full)) for full in (False, True))
        table.add_row(name, found.title, str(len(found.rows)), str(first), str(everything))
    console.print(table)


def print_tables(results: StudyResults) -> None:
    """The study's tables on the console."""
    for data in results.data_names:
        for name in results.study.tables:
            rows = [row for row in results.of(data, name) if row.runs]
            if rows:
                _print_table(results, rows, ", ".join(text for text in (results.study.name, name, data) if text))


def _print_table(results: StudyResults, rows: list[RowResult], title: str) -> None:
    table = Table("method", "seeds", title=f"{title}: {results.part}, %", box=SIMPLE_HEAD)
    for metric in results.study.metrics:
        table.add_column(METRIC_TITLES[metric], justify="right")
    for row in rows:
        cells = []
        for metric in results.study.metrics:
            text = cell(results, row, metric, paper=False)
            cells.append(f"[bold]{text}[/]" if row is results.best(rows, metric) else text)
        table.add_row(row.row.name, str(len(row.runs)), *cells)
    console.print(table)
    for note in notes(results, rows)[:2]:
        console.print(note, highlight=False, style="dim")
