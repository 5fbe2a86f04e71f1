"""A study's runs in one file, `study.sqlite`: each log is read once, and again only when it has changed."""

from __future__ import annotations

import json
import sqlite3
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from equipoise.core.errors import UserError, first_line
from equipoise.core.version import __version__
from equipoise.engine.events import first_event
from equipoise.methods import get_method
from equipoise.report.record import TOLD, RunRecord, read_run
from equipoise.report.run_facts import left_out
from equipoise.studies.archive import FILES, LOG
from equipoise.studies.checks import REMEDY, DamagedRun, check_log, is_finished
from equipoise.studies.grid import Cell
from equipoise.studies.rows import PLACE, RunResult, reported_rule
from equipoise.studies.runner import shared_with
from equipoise.studies.study_file import StudyConfig

DATABASE = "study.sqlite"
#: changes with what is read of a log, so that databases of before are made anew
VERSION = 1
TABLES = {
    "runs": "run TEXT PRIMARY KEY, study TEXT, data TEXT, row TEXT, method TEXT, seed INTEGER, rounds INTEGER, "
    "selected_round INTEGER, validation REAL, seconds REAL, parameters INTEGER, together INTEGER, version TEXT",
    "results": "run TEXT REFERENCES runs(run), data TEXT, row TEXT, method TEXT, seed INTEGER, "
    "part TEXT, view TEXT, scope TEXT, site TEXT, class TEXT, metric TEXT, value REAL",
    "curves": "run TEXT REFERENCES runs(run), round INTEGER, part TEXT, view TEXT, site TEXT, metric TEXT, value REAL",
    "traffic": "run TEXT REFERENCES runs(run), round INTEGER, site TEXT, sent INTEGER, received INTEGER, "
    "seconds REAL, loss REAL",
    "logs": "run TEXT PRIMARY KEY, stamp TEXT, start TEXT, told TEXT",
}
LEFT_OUT = "was left out of round"
#: errors of a full or failing disk, and of a folder that can only be read
DISK_ERRORS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
READ_ONLY = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
#: the part of an error's code that names its kind
PRIMARY = 0xFF
#: seconds that one process waits while another reads logs
PATIENCE = 600.0


class DamagedDatabase(Exception):
    """A part of the database could not be read. It is gone: the next one is made of the logs."""


@contextmanager
def opened(study: StudyConfig, folder: Path) -> Iterator[sqlite3.Connection]:
    """The database of a study within a transaction; in memory where the folder can only be read."""
    path = folder / DATABASE
    key = zlib.crc32(json.dumps([VERSION, __version__, study.name, study.part]).encode()) >> 1
    try:
        with closing(_begun(path)) as base:
            if base.execute("PRAGMA user_version").fetchone()[0] != key:
                for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    base.execute(f'DROP TABLE "{name}"')
                for name, columns in TABLES.items():
                    base.execute(f"CREATE TABLE {name} ({columns})")
                base.execute("CREATE INDEX results_by_metric ON results (metric, scope, view)")
                base.execute(f"PRAGMA user_version = {key}")
            yield base
            base.execute("COMMIT")
    except (sqlite3.DatabaseError, pd.errors.DatabaseError) as problem:
        cause = problem.__cause__ or problem  # pandas wraps what SQLite says
        if getattr(cause, "sqlite_errorcode", 0) & PRIMARY == sqlite3.SQLITE_CORRUPT and path.is_file():
            path.unlink()
            raise DamagedDatabase from None
        if not isinstance(problem, sqlite3.OperationalError):
            raise
        if problem.sqlite_errorcode & PRIMARY not in DISK_ERRORS:
            raise
        raise UserError(f"{path} could not be written: {problem}") from None


def _begun(path: Path) -> sqlite3.Connection:
    for place in (path, path, ":memory:"):
        try:
            base = sqlite3.connect(place, timeout=PATIENCE, isolation_level=None)
            base.text_factory = lambda text: sys.intern(text.decode())  # the same few words stand in many lines
            base.execute("BEGIN IMMEDIATE")
            base.execute("SELECT count(*) FROM sqlite_master")
            return base
        except sqlite3.OperationalError as problem:
            if problem.sqlite_errorcode & PRIMARY not in READ_ONLY:
                raise
        except sqlite3.DatabaseError:  # no database, or a damaged one
            path.unlink()
    raise AssertionError


def read_runs(
    base: sqlite3.Connection, study: StudyConfig, cells: Sequence[Cell]
) -> tuple[dict[str, RunResult], list[str], dict[str, Exception]]:
    """The finished runs among the cells, and the labels of the unfinished and of the damaged ones.

    Logs that are new or have changed are read into the database; runs that are gone leave it.
    """
    known: dict[str, str] = dict(base.execute("SELECT run, stamp FROM logs"))
    unfinished: list[str] = []
    damaged: dict[str, Exception] = {}
    stamps = {cell.label: _stamp(cell) for cell in cells}
    for label in (label for label, stamp in known.items() if stamps.get(label) != stamp):
        for table in TABLES:
            base.execute(f"DELETE FROM {table} WHERE run = ?", [label])
    for cell in (cell for cell in cells if known.get(cell.label) != stamps[cell.label]):
        try:
            check_log(cell.folder)
            if is_finished(cell.folder):
                _put(base, study, cell, stamps[cell.label])
            else:
                unfinished.append(cell.label)
        except DamagedRun as problem:
            damaged[cell.label] = problem
    told = {label: rest for label, *rest in base.execute("SELECT run, start, told FROM logs")}
    found = [RunResult(cell, *map(json.loads, told[cell.label])) for cell in cells if cell.label in told]
    return {run.cell.label: run for run in found}, unfinished, damaged


def _stamp(cell: Cell) -> str:
    """Changes with the files of a run, and with what the study says of it."""
    stats = [path.stat() for name in FILES if (path := cell.folder / name).is_file()]
    return json.dumps([cell.row.method, *((stat.st_size, stat.st_mtime_ns) for stat in stats)])


def _put(base: sqlite3.Connection, study: StudyConfig, cell: Cell, stamp: str) -> None:
    """Read a finished run into the database, if its files say all that tables need."""
    try:
        record = read_run(cell.folder)
        start = first_event(cell.folder / LOG) | {"config": record.start.config}
        told = _told(record, study.part, shared_with(cell.folder))
        reported_rule(record.start.config)
        RunResult(cell, start, told).check()
        tables = _tables(study, cell, record, told)
    except DamagedRun:
        raise
    except (UserError, ValueError, KeyError, TypeError) as problem:
        raise DamagedRun(f"{first_line(problem)}; {REMEDY}") from None
    untestable = study.part == "valid" or not record.start.images["test"].any(axis=None)
    if record.rounds.empty or not (untestable or "mean" in set(record.finals["scope"])):
        lacking = "test result" if len(record.rounds) else "round"
        raise DamagedRun(f"{cell.folder / LOG} tells of no {lacking}; {REMEDY}")
    tables["logs"] = pd.DataFrame([{"stamp": stamp, "start": json.dumps(start), "told": json.dumps(told)}])
    for table, own in tables.items():
        lines = own.assign(run=cell.label)
        places = f"({', '.join(lines)}) VALUES ({', '.join('?' * lines.shape[1])})"
        base.executemany(f"INSERT INTO {table} {places}", lines.itertuples(index=False, name=None))  # NaN is NULL there


def _told(record: RunRecord, part: str, together: int) -> dict[str, Any]:
    """What a study says of a run besides its scores and curves."""
    scored, work = record.evaluations, record.work
    own = record.start.images[part].sum(axis=1)
    cohorts = {*record.finals["site"][record.finals["scope"] == "cohort"]}
    return {
        "rounds": record.last_round,
        "selected_round": record.selected_round,
        "validation": record.selection.score if record.selection else None,
        "seconds": record.seconds,
        "together": together,
        "warnings": [*record.warnings, *(f"{site} {LEFT_OUT} {r}: {why}" for site, r, why in left_out(record))],
        "chosen": [[selection.view, selection.metric] for selection in record.selections],
        "measured": [*scored["view"][scored["part"] == "valid"].unique()],
        "round_view": record.round_view,
        "judges": [site for site in own.index[own > 0] if site not in cohorts],
        "seconds_per_round": sum(record.rounds["seconds"].tolist()) / max(len(record.rounds), 1),
        "visits": len(work),
        "sent": int(work["sent"].sum()),
        "received": int(work["received"].sum()),
        "entries": record.entries.sum().to_dict(),
        "rounds_with_entries": len(record.entries),
    }


def _tables(study: StudyConfig, cell: Cell, record: RunRecord, told: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """The lines of a run by table, scores as fractions."""
    of = {"data": cell.data_name, "row": cell.row.name, "method": cell.row.method, "seed": cell.seed}
    facts = {name: told[name] for name in ("rounds", "selected_round", "validation", "seconds", "together")}
    facts |= {"study": study.name, "parameters": record.start.parameters, "version": record.start.version}
    # Test scores of single rounds, where runs measured any, stay out of a study that may not show them.
    scored = record.evaluations
    scored = scored if study.part == "test" else scored[scored["part"] == "valid"]
    metrics = [column for column in scored if column not in TOLD]
    work = record.work[["round", "site", "sent", "received", "seconds", "loss"]]
    scores = _scores(record, study.part).replace({"site": "", "class": ""}, None)
    return {
        "runs": pd.DataFrame([of | facts]),
        "results": scores.assign(**of),
        "curves": scored.melt(["round", "part", "view", "site"], metrics, "metric"),
        "traffic": work[:0] if get_method(cell.row.method).pooled else work,  # sites of pooled training send nothing
    }


def _scores(record: RunRecord, part: str) -> pd.DataFrame:
    """All that the study may show of a run: test results, or validation scores of what it reports.

    Tidy: a line per number; class or site are empty where it is of all.
    """
    told = (record.finals if part == "test" else record.validation).set_index(PLACE[:4])
    metrics = told[[column for column in told if column not in TOLD]].melt(ignore_index=False, var_name="metric")
    recall, classes = told["recall"][told["recall"].str.len() > 0], record.start.classes
    by_class = pd.DataFrame(recall.tolist(), recall.index).reindex(columns=range(len(classes)))
    known = by_class.set_axis(classes, axis=1).melt(ignore_index=False, var_name="class").assign(metric="recall")
    lines = pd.concat([metrics.assign(**{"class": ""}), known]).reset_index()
    return lines[[*PLACE, "value"]].astype({"value": float})


# ---- frames -------------------------------------------------------------------------------------------------------


def read_scores(base: sqlite3.Connection, runs: Mapping[str, RunResult]) -> pd.DataFrame:
    """A line per number of the runs, in their order, as fractions; of the folds of a seed, their mean."""
    lines = pd.read_sql_query("SELECT * FROM results", base).fillna({"site": "", "class": ""})
    lines = lines.iloc[lines["run"].map({label: place for place, label in enumerate(runs)}).argsort(kind="stable")]
    if all(run.cell.fold is None for run in runs.values()):
        return lines
    keys = ["data", "row", "seed", *PLACE]
    return lines.groupby(keys, sort=False)["value"].mean().reset_index()


def read_curves(base: sqlite3.Connection, runs: Mapping[str, RunResult], metric: str, drop: str) -> pd.DataFrame:
    """Mean validation scores over sites as fractions: a column per run and view, a line per round.

    The view `drop` is retrogress of the metric of this name: models right after training less those that a round
    leaves.
    """
    asked = "SELECT run, view, round, site, value FROM curves WHERE part = 'valid' AND metric = ? AND value IS NOT NULL"
    keys = ["run", "round", "site"]
    own, other = (pd.read_sql_query(asked, base, params=[name]) for name in (metric, drop))
    after = other[other["view"] == other["run"].map({label: run.told["round_view"] for label, run in runs.items()})]
    both = other[other["view"] == "trained"].merge(after, on=keys, suffixes=("", "_after"))
    lost = both.assign(view="drop", value=both["value"] - both["value_after"])[own.columns]
    lines = pd.concat([own, lost])
    return lines.pivot_table("value", "round", ["run", "view"], "mean") if len(lines) else pd.DataFrame()
