"""`study.sqlite`: a row per run, method, seed, site, class and metric, for queries and tables of one's own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from equipoise.core.errors import UserError
from equipoise.core.storage import replacing
from equipoise.methods import get_method
from equipoise.studies.results import RunResult, StudyResults

#: errors that the disk is to blame for, and the part of a code that names its kind
DISK_ERRORS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
PRIMARY = 0xFF
SCHEMA = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY, study TEXT, data TEXT, row TEXT, method TEXT, seed INTEGER, rounds INTEGER,
    selected_round INTEGER, validation REAL, seconds REAL, parameters INTEGER, together INTEGER, version TEXT
);
CREATE TABLE results (
    run TEXT REFERENCES runs(run), data TEXT, row TEXT, method TEXT, seed INTEGER,
    part TEXT, view TEXT, scope TEXT, site TEXT, class TEXT, metric TEXT, value REAL
);
CREATE TABLE curves (
    run TEXT REFERENCES runs(run), round INTEGER, part TEXT, view TEXT, site TEXT, metric TEXT, value REAL
);
CREATE TABLE traffic (
    run TEXT REFERENCES runs(run), round INTEGER, site TEXT, sent INTEGER, received INTEGER, seconds REAL, loss REAL
);
CREATE INDEX results_by_metric ON results (metric, scope, view);
"""


def write_database(results: StudyResults, path: Path) -> None:
    """Write all finished runs, as fractions; the file is replaced whole."""
    try:
        with replacing(path) as draft, closing(sqlite3.connect(draft)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")  # nobody rolls a draft back
            connection.executescript(SCHEMA)
            for run in results.runs:
                _insert(connection, "runs", [_run(results.study.name, run)])
                _insert(connection, "results", _results(run))
                _insert(connection, "curves", _curves(run))
                _insert(connection, "traffic", _traffic(run))
            connection.commit()
    except sqlite3.OperationalError as problem:
        if problem.sqlite_errorcode & PRIMARY not in DISK_ERRORS:
            raise
        raise UserError(f"{path} could not be written: {problem}") from None


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
    for row in rows:
        connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def _identity(run: RunResult) -> tuple[str, str, str, str, int]:
    cell = run.cell
    return (cell.label, cell.data.name if cell.data else "", cell.row.name, cell.row.method, cell.seed)


def _run(study: str, run: RunResult) -> tuple[Any, ...]:
    record = run.record
    label, data, row, method, seed = _identity(run)
    value = record.selection.score if record.selection else None
    facts = (record.last_round, record.selected_round, value, record.seconds, record.start.parameters)
    return (label, study, data, row, method, seed, *facts, run.together, record.start.version)


def _results(run: RunResult) -> Iterator[tuple[Any, ...]]:
    for result in run.measured:
        place = (*_identity(run), result.part, result.view, result.scope, result.site)
        for metric, value in result.metrics.items():
            yield (*place, None, metric, value)
        for name, value in zip(run.record.start.classes, result.recall):
            yield (*place, name, "recall", value)


def _curves(run: RunResult) -> Iterator[tuple[Any, ...]]:
    # Test scores of single rounds, where runs measured any, stay out of a study that may not show them.
    for scored in (each for each in run.record.evaluations if run.part == "test" or each.part == "valid"):
        for metric, value in scored.metrics.items():
            yield (run.cell.label, scored.round, scored.part, scored.view, scored.site, metric, value)


def _traffic(run: RunResult) -> Iterator[tuple[Any, ...]]:
    if get_method(run.cell.row.method).pooled:  # no site sends anything
        return
    for finished in run.record.rounds:
        for site, work in finished.sites.items():
            yield (run.cell.label, finished.round, site, work.sent, work.received, work.seconds, work.loss)
