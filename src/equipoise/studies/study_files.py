"""What a study leaves behind, written anew from its runs: summary, tables, and the report as one page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from equipoise.core.storage import write_text
from equipoise.report.sheet import latex, markdown
from equipoise.studies import remarks
from equipoise.studies.results import StudyResults
from equipoise.studies.row_cost import row_cost
from equipoise.studies.rows import VIEWS, RowResult, Spreads
from equipoise.studies.score_tables import tables_of, tables_to_come
from equipoise.studies.side_tables import side_tables
from equipoise.studies.study_page import render

CSV_COSTS = ("model_bytes", "flops_per_image", "sent_per_round", "received_per_round", "seconds_per_round", "seconds")


def write_study(results: StudyResults, folder: Path) -> None:
    """Write everything that follows from the finished runs of a study into its folder."""
    write_text(folder / "summary.json", json.dumps(summary(results), indent=1, ensure_ascii=False))
    write_text(folder / "table.csv", to_csv(results))
    write_text(folder / "table.tex", to_latex(results))
    write_text(folder / "table.md", to_markdown(results))
    write_text(folder / "report.html", render(results))


# ---- tables ------------------------------------------------------------------------------------------------------


def to_latex(results: StudyResults) -> str:
    r"""Every table that has something to show as a `table` for `\usepackage{booktabs}`, the best of a column in bold,
    notes beneath; then those of sites, unseen cohorts, images and costs."""
    sheets = []
    for data in results.data_names:
        sheets += [*(table.sheet() for table in tables_of(results, data)), *side_tables(results, data)]
    tables = (latex(shown, f"{results.study.name}-{place}") for place, shown in enumerate(sheets, start=1))
    return "\n".join(["% needs \\usepackage{booktabs}\n", *tables])


def to_markdown(results: StudyResults) -> str:
    """The same for documentation, with the main score of each kind of model."""
    parts: list[str] = []
    for data in results.data_names:
        parts += [markdown(table.sheet_by_view()) for table in tables_of(results, data)]
        parts += [markdown(side) for side in side_tables(results, data)]
    return "\n\n".join(parts) + "\n"


def to_csv(results: StudyResults) -> str:
    """A line per row and data set, and one per unseen cohort; in per cent, empty where not known."""
    columns = [f"{metric}{suffix}" for metric in results.study.kept_metrics for suffix in ("", "_std", "_paper")]
    head = ["study", "data", "tables", "cohort", "method", "view", "seeds", *columns, *CSV_COSTS, "rule"]
    lines = [line for row in results.rows if row.runs for line in _csv_lines(results, row)]
    return pd.DataFrame(lines, columns=head, dtype=object).to_csv(index=False, lineterminator="\n")


def _csv_lines(results: StudyResults, row: RowResult) -> Iterator[dict[str, Any]]:
    common = {"study": results.study.name, "data": row.data, "tables": "; ".join(row.row.tables), "rule": results.rule}
    common |= {"method": row.row.name, "seeds": " ".join(map(str, row.seeds))}
    cost = row_cost(row, results.of(row.data))
    own = common | {"cohort": "", "view": row.view} | {key: cost[key] for key in CSV_COSTS}
    yield own | _csv_scores(row.scores, row.row.paper)
    for cohort, view in row.places("cohort").items():
        scores = _csv_scores(row.scores_of(view, "cohort", cohort), row.row.paper_cohort)
        yield common | {"cohort": cohort, "view": view} | scores


def _csv_scores(scores: Spreads, paper: Mapping[str, float]) -> dict[str, float | None]:
    means = {metric: own.mean for metric, own in scores.items()}
    return means | {f"{m}_std": own.std for m, own in scores.items()} | {f"{m}_paper": own for m, own in paper.items()}


# ---- summary.json ------------------------------------------------------------------------------------------------


def summary(results: StudyResults) -> dict[str, Any]:
    """Everything that the tables say, and more, as plain values: all in per cent."""
    study = results.study
    tables = {data: tables_of(results, data) for data in results.data_names}
    tests = {
        data: [{"table": table.name, **asdict(test)} for table in own for test in table.comparisons]
        for data, own in tables.items()
    }
    incomparable = {
        data: [": ".join(filter(None, (table.name, text))) for table in own for text in table.incomparable]
        for data, own in tables.items()
    }
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
        "tests": {data: own for data, own in tests.items() if own},
        "incomparable": {data: own for data, own in incomparable.items() if own},
        "mean_ranks": results.ranking.means,
        "not_run": remarks.not_run(results),
        "later": remarks.later(results),
        "tables_to_come": tables_to_come(results),
        "unfinished": list(results.unfinished),
        "damaged": list(results.damaged),
        "strangers": list(results.strangers),
    }


def _row_summary(results: StudyResults, row: RowResult) -> dict[str, Any]:
    named = {"method": row.row.name, "runs": row.row.method} | ({"data": row.data} if row.data else {})
    return named | {
        **_plain(results, row.scores),
        **(intervals.summary(row.row.name) if (intervals := results.intervals[row.data]) else {}),
        "view": row.view,
        "seeds": row.seeds,
        "rounds": max(run.told["rounds"] for run in row.runs),
        "selected_rounds": [run.told["selected_round"] for run in row.runs],
        "validation": asdict(row.validation) if row.validation else None,
        "paper": dict(row.row.paper),
        "note": row.row.note,
        "views": {view: _plain(results, row.scores_of(view)) for view in row.lines["view"].unique()},
        "sites": {
            site: _plain(results, row.scores_of(view, "site", site)) for site, view in row.places("site").items()
        },
        "cohorts": {
            cohort: _plain(results, row.scores_of(view, "cohort", cohort)) | {"paper": dict(row.row.paper_cohort)}
            for cohort, view in row.places("cohort").items()
        },
        "recall": {name: asdict(each) for name, each in row.recall.items()},
        "cost": row_cost(row, results.of(row.data)),
    }


def _plain(results: StudyResults, spreads: Spreads) -> dict[str, Any]:
    """Every metric, None where it could not be measured."""
    return {metric: asdict(spreads[metric]) if metric in spreads else None for metric in results.study.kept_metrics}
