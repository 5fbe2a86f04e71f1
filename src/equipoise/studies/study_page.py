"""The report of a study as one page: tables, tests, figures and what a reader has to know besides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equipoise.core.version import __version__
from equipoise.report.measured import TITLES
from equipoise.report.page import page
from equipoise.report.run_figures import federation_bubbles
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.wording import UNKNOWN, duration
from equipoise.studies import remarks
from equipoise.studies import study_figures as figures
from equipoise.studies.grid import listed
from equipoise.studies.results import StudyResults, retrogress_metric
from equipoise.studies.row_cost import shared_times
from equipoise.studies.rows import RowResult, federation_of
from equipoise.studies.score_tables import tables_of, tables_to_come
from equipoise.studies.side_tables import side_tables

#: by scope, whose learning is drawn
MODELS_DRAWN = {
    "sites": "personal models where a method has them, else the global one",
    "trained": "models right after local training, where a method has such",
    "common": "the global model, where a method has one",
}


def render(results: StudyResults) -> str:
    """The HTML text of the report."""
    sections = [_section(results, f"data{place}", data) for place, data in enumerate(results.data_names, start=1)]
    over = {"ranks": figures.rank_plot(results), "over-data": figures.over_data(results)}
    return page(
        "study.html",
        Path(__file__).parent,
        results=results,
        titles=TITLES,
        models_drawn=MODELS_DRAWN[results.study.scope],
        dropped=retrogress_metric(results.study.primary),
        lacking=remarks.runs_lacking(results),
        later=remarks.later(results),
        not_run=remarks.not_run(results),
        to_come=tables_to_come(results),
        warnings=remarks.warnings(results.rows),
        seconds=sum(run.told["seconds"] or 0.0 for run in results.runs),
        together=max((run.told["together"] for run in results.runs), default=1),
        sections=sections,
        over={"id": "", "figures": over},
        finding=remarks.finding(results),
        lead={"id": "", "figures": {"ranked": figures.ranked(results)}},
        listed=listed,
        ranks_caption=_ranks_caption(results),
        runs=_runs(results),
        version=__version__,
    )


def _runs(results: StudyResults) -> Sheet:
    """Every finished run."""
    primary = results.study.primary
    scores = ((row, row.values(primary, by_site=False)) for row in results.rows)
    found = [(own.get(run.cell.seed), run) for row, own in scores for run in row.runs]
    names = {"Run": [run.cell.label for _, run in found], "Method": [run.cell.row.method for _, run in found]}
    columns = {
        "Seed": [str(run.cell.seed) for _, run in found],
        "Rounds": [str(run.told["rounds"]) for _, run in found],
        "Reported round": [str(run.told["selected_round"] or "by site") for _, run in found],
        TITLES[primary]: [UNKNOWN if score is None else f"{score:.2f}" for score, _ in found],
        "Time": [duration(run.told["seconds"] or 0.0) for _, run in found],
    }
    return sheet("Every finished run.", names, columns)


def _section(results: StudyResults, id: str, data: str) -> dict[str, Any]:
    """Everything about one data set."""
    rows, tables = results.of(data), tables_of(results, data)
    federation = federation_of(rows)
    drawn = {
        "recall": figures.rare_classes(rows),
        "learning": figures.learning(results, rows),
        "retrogress": figures.retrogress_curves(results, rows),
        "cost": figures.cost(rows),
        "federation": federation_bubbles(federation) if federation else None,
    }
    return {
        "id": id,
        "title": data or "Results",
        "tables": [(table.sheet_on_page(), table.tests_sheet() if table.comparisons else None) for table in tables],
        "sides": side_tables(results, data),
        "figures": drawn,
        "undrawn": _undrawn(rows),
        "seed": federation.config.get("seed") if federation else "",
        "shared_times": " ".join(shared_times(rows)),
        "others": [r.row.name for r in rows if any(figures.curve_view(run, r) != r.view for run in r.runs)],
    }


def _undrawn(rows: Sequence[RowResult]) -> str:
    """Why the curves of retrogress are missing; nothing where they are not."""
    runs = [run for row in rows for run in row.runs]
    if not runs or any("trained" in run.told["measured"] for run in runs):
        return ""
    why = ""
    if not any(run.start.config["evaluation"].get("trained", True) for run in runs):
        why = " (evaluation.trained = false)"
    elif not any(run.start.images["valid"].loc[run.start.training_images.index].any(axis=None) for run in runs):
        why = ", for the sites have no separate validation images"
    return f"No curves of retrogress: models were not scored right after local training{why}."


def _ranks_caption(results: StudyResults) -> str:
    text = f"Ranks by {TITLES[results.study.primary]}, mean over seeds"
    if any(row.runs and row.pooled for row in results.rows):
        text += ", pooled training apart"
    if results.ranked_over == "common set":
        text += ", on the one common set: ranks are the order of these means"
    else:
        text += f": a light dot for each {results.ranked_over}, a dark one for their mean"
    lacking = results.ranking.lacking.items()
    without = "; ".join(f"without {name}, which lacks {', '.join(blocks)}" for name, blocks in lacking)
    return f"{text}; {without}." if without else f"{text}."
