"""What a reader of a study has to know besides its scores: warnings of the runs, and which runs are still lacking."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.data.splits import SHARED
from equipoise.report.record import RunRecord
from equipoise.report.run_facts import left_out
from equipoise.studies.grid import grid
from equipoise.studies.results import StudyResults
from equipoise.studies.rows import RowResult, RunResult, holders

LEFT_OUT = "was left out of round"


def warnings(rows: Sequence[RowResult]) -> list[str]:
    """The warnings of all runs of these rows, each text once, after the runs that it holds for."""
    found: dict[str, list[RunResult]] = {}
    for run in (run for row in rows for run in row.runs):
        for text in (*run.record.warnings, *_absences(run.record)):
            found.setdefault(text, []).append(run)
    whose = {text: holders(rows, runs) for text, runs in found.items()}
    return [f"{who[0].upper() + who[1:] if who == 'all runs' else who}: {text}" for text, who in whose.items()]


def caveats(rows: Sequence[RowResult]) -> list[str]:
    """Those of the warnings that stand under a table: of groups shared between training and evaluation, and of sites
    that were left out of rounds."""
    return [text for text in warnings(rows) if SHARED in text or LEFT_OUT in text]


def _absences(record: RunRecord) -> list[str]:
    return [f"{site} {LEFT_OUT} {rounds}: {why}" for site, rounds, why in left_out(record)]


def not_run(results: StudyResults) -> list[str]:
    """What the first wave lacks: rows without a finished run, and seeds of others, less the runs already begun."""
    begun = {run.cell.label for run in results.runs} | {*results.unfinished, *results.damaged}
    seeds: dict[tuple[str, str], list[int]] = {}
    for cell in grid(results.study, results.folder):
        if cell.label not in begun:
            seeds.setdefault((cell.data_name, cell.row.name), []).append(cell.seed)
    found = []
    for row in results.rows:
        own = sorted(seeds.get((row.data, row.row.name), ()))
        named = f" ({'seed' if len(own) == 1 else 'seeds'} {', '.join(map(str, own))})" if row.runs else ""
        found += [f"{row.full_name}{named}"] if own else []
    return found


def later(results: StudyResults) -> list[str]:
    """Rows that the file keeps for the full grid and that have no run."""
    first = {(cell.data_name, cell.row.name) for cell in grid(results.study, results.folder)}
    return [row.full_name for row in results.rows if not row.runs and (row.data, row.row.name) not in first]


def runs_lacking(results: StudyResults) -> int:
    """How many runs are not finished: those of the first wave, and others that were begun."""
    finished = {run.cell.label for run in results.runs}
    return len({cell.label for cell in grid(results.study, results.folder)} - finished | set(results.unfinished))
