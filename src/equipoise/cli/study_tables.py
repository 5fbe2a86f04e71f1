"""A study on the console: what is planned, and its tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from equipoise.contract.config import Config
from equipoise.core.errors import UserError
from equipoise.report.measured import EVERY
from equipoise.studies.checks import check_finished, is_finished
from equipoise.studies.grid import Cell
from equipoise.studies.remarks import caveats
from equipoise.studies.results import StudyResults
from equipoise.studies.score_tables import StudyTable, tables_of

#: rows' names up to this length stay on one line of a table
LONGEST_NAME = 20
#: columns of a console that no table needs
WIDE = 1000


def print_plan(console: Console, planned: Sequence[tuple[Cell, Config]], kept: Sequence[tuple[Cell, Config]]) -> None:
    """The runs of the grid, row by row, with what has been done, what is kept for later, and what stands in the way."""
    with_data = any(cell.data for cell, _ in (*planned, *kept))
    names = ("row", "method", "data") if with_data else ("row", "method")
    table = Table(*names, "finished", "begun", "to run", "later", box=SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"
    rows: dict[tuple[str, ...], tuple[list[int], ...]] = {}
    problems: list[str] = []
    for (cell, config), place in [*((run, 2) for run in planned), *((run, 3) for run in kept)]:
        finished, begun = is_finished(cell.folder), (cell.folder / "events.jsonl").exists()
        key = (cell.row.name, cell.row.method, *([cell.data.name] if cell.data else []))
        columns = rows.setdefault(key, ([], [], [], []))
        columns[0 if finished else 1 if begun else place].append(cell.seed)
        try:
            if finished:
                check_finished(cell, config)
        except UserError as problem:
            problems.append(str(problem))
    for key, columns in rows.items():
        table.add_row(*map(escape, key), *(", ".join(map(str, sorted(seeds))) for seeds in columns))
    console.print(table)
    console.print("finished, begun, to run: seeds; later: those of --full. Nothing was run.", style="dim")
    if problems:
        raise UserError(f"{len(problems)} of the finished runs cannot be used; the first: {problems[0]}")


def print_tables(console: Console, results: StudyResults) -> None:
    """The study's tables on the console."""
    for table in (table for data in results.data_names for table in tables_of(results, data)):
        shown = _shown(table)
        if not _fits(console, shown):
            shown = _shown(table, narrow=True)
        if not _fits(console, shown):
            shown.columns[0].min_width = None  # names fold
        console.print(shown)
        tests = [table.tests_note] if table.tests_note else []
        for note in [table.rule, results.scope, *caveats(table.rows), *table.incomparable, *tests]:
            console.print(escape(note), highlight=False, style="dim")


def _fits(console: Console, shown: Table) -> bool:
    return console.measure(shown, options=console.options.update(width=WIDE)).maximum <= console.width


def _shown(table: StudyTable, narrow: bool = False) -> Table:
    """The printed table; on a narrow console deviations stand below the means."""
    study, headings = table.results.study, {metric.title: metric.heading for metric in EVERY}
    ours = [title for title in table.cells if title in headings]
    title = ", ".join(text for text in (study.name, table.name, table.data) if text)
    shown = Table("method", "seeds", title=escape(f"{title}: {table.results.part}, %"), box=SIMPLE_HEAD)
    shown.padding = (0, 0, 0, 1) if narrow else (0, 1)
    shown.columns[0].overflow = "fold"
    shown.columns[0].min_width = min(max(map(len, table.cells.index), default=0), LONGEST_NAME)
    for column in ours:
        shown.add_column(headings[column], justify="right")
    cells = table.cells[ours].mask(table.best[ours], "[bold]" + table.cells[ours] + "[/]")
    if narrow:
        cells = cells.map(lambda text: text.replace(" ± ", "\n± "))
    for row, (name, texts) in zip(table.rows, cells.iterrows()):
        shown.add_row(escape(str(name)), str(len(row.seeds)), *texts)
    return shown
