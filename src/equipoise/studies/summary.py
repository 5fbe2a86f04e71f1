"""A study's results as plain values, for `summary.json`: all in per cent."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from equipoise.studies import remarks
from equipoise.studies.cost import cost
from equipoise.studies.grid import METRICS
from equipoise.studies.results import StudyResults
from equipoise.studies.rows import VIEWS, RowResult, Spreads
from equipoise.studies.table import tables_of, tables_to_come


def summary(results: StudyResults) -> dict[str, Any]:
    """Everything that the tables say, and more."""
    study = results.study
    return {
        "study": study.name,
        "title": study.title,
        "rule": results.rule,
        "scope": "common" if study.scope == "common" else "sites",
        "models": VIEWS[study.scope][0],
        "part": study.part,
        "primary": study.primary,
        "paper": study.paper,
        "differs": [*study.differs, *results.deviations],
        "warnings": remarks.warnings(results.rows),
        "rows": [_row_summary(results, row) for row in results.rows if row.runs],
        "tests": {data: tests for data in results.data_names if (tests := _tests(results, data))},
        "incomparable": {data: told for data in results.data_names if (told := _incomparable(results, data))},
        "mean_ranks": results.ranking.means,
        "not_run": remarks.not_run(results),
        "later": remarks.later(results),
        "tables_to_come": tables_to_come(results),
        "unfinished": list(results.unfinished),
        "damaged": list(results.damaged),
        "strangers": list(results.strangers),
    }


def _tests(results: StudyResults, data: str) -> list[dict[str, Any]]:
    """The tests of a data set, each with the table that it was made for."""
    return [
        {"table": table.name, **asdict(comparison)}
        for table in tables_of(results, data)
        for comparison in table.comparisons
    ]


def _incomparable(results: StudyResults, data: str) -> list[str]:
    """Why rows of a table do not compare, after its name."""
    tables = tables_of(results, data)
    return [": ".join(filter(None, (table.name, text))) for table in tables for text in table.incomparable]


def _row_summary(results: StudyResults, row: RowResult) -> dict[str, Any]:
    views = list(dict.fromkeys(view for run in row.runs for view in run.views))
    entry: dict[str, Any] = {"method": row.row.name, "runs": row.row.method}
    if row.data:
        entry["data"] = row.data
    return entry | {
        **_plain(row.scores),
        "view": row.view,
        "seeds": sorted(run.cell.seed for run in row.runs),
        "rounds": max(run.record.last_round for run in row.runs),
        "selected_rounds": [run.record.selected_round for run in row.runs],
        "validation": asdict(row.validation) if row.validation else None,
        "paper": dict(row.row.paper),
        "note": row.row.note,
        "views": {view: _plain(row.scores_of(view)) for view in views},
        "sites": {site: _plain(row.scores_of(view, "site", site)) for site, view in row.places("site").items()},
        "cohorts": {
            cohort: _plain(row.scores_of(view, "cohort", cohort)) | {"paper": dict(row.row.paper_cohort)}
            for cohort, view in row.places("cohort").items()
        },
        "recall": {name: asdict(each) for name, each in row.recall.items()},
        "cost": cost(results, row),
    }


def _plain(spreads: Spreads) -> dict[str, Any]:
    """Every metric, None where it could not be measured."""
    return {metric: asdict(spreads[metric]) if metric in spreads else None for metric in METRICS}
