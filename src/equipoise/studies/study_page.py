"""The report of a study as one page: tables, tests, figures and what a reader has to know besides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.core.version import __version__
from equipoise.report.page import Picture, page, picture
from equipoise.report.plotting import style
from equipoise.report.run_facts import METRIC_TITLES
from equipoise.report.run_figures import federation_bubbles, sites_shown
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.wording import UNKNOWN, duration
from equipoise.statistics import Spread
from equipoise.studies import remarks
from equipoise.studies import study_figures as figures
from equipoise.studies.grid import listed
from equipoise.studies.results import StudyResults
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
    primary = METRIC_TITLES[results.study.primary]
    over_data = f"{primary} by data set, mean over seeds, with a deviation over seeds."
    with style():
        sections = [_section(results, f"data{place}", data) for place, data in enumerate(results.data_names, start=1)]
        ranks = picture("ranks", figures.rank_plot(results), _ranks_caption(results))
        data_sets = picture("over-data", figures.over_data(results), over_data)
    return page(
        "study.html",
        Path(__file__).parent,
        name=results.study.name,
        title=results.study.title or results.study.name,
        kicker="Report of a study",
        results=results,
        told=_facts(results),
        not_run=remarks.not_run(results),
        warnings=remarks.warnings(results.rows),
        sections=sections,
        ranks=ranks,
        over_data=data_sets,
        runs=_runs(results),
        version=__version__,
    )


def _facts(results: StudyResults) -> list[tuple[str, str | Sequence[str]]]:
    """What stands at the top, by name: a text, or a list of them."""
    study, runs = results.study, results.runs
    at_a_time = max((run.together for run in runs), default=1)
    over = f" added up over all runs, up to {at_a_time} at a time" if at_a_time > 1 else " over all runs"
    entries: list[tuple[str, str | Sequence[str]]] = [
        ("Study", study.name),
        ("Preset", study.preset or ""),
        ("Runs", f"{len(runs)} finished, {remarks.runs_lacking(results)} not"),
        ("With --full", "; ".join(remarks.later(results))),
        ("To come", "; ".join(tables_to_come(results))),
        ("Left aside", f"runs of no row: {listed(results.strangers)}" if results.strangers else ""),
        ("Scope", results.scope),
        ("Selection", results.rule),
        ("Paper", study.paper),
        ("Differs" if results.has_paper else "Notes", study.differs),
        ("Changed", results.deviations),
        ("Time", duration(sum(run.record.seconds or 0.0 for run in runs)) + over),
    ]
    return [(name, value) for name, value in entries if value]


def _runs(results: StudyResults) -> Sheet:
    """Every finished run."""
    primary = results.study.primary
    found = [(row.values(primary, by_site=False).get(run.cell.seed), run) for row in results.rows for run in row.runs]
    names = {"Run": [run.cell.label for _, run in found], "Method": [run.cell.row.method for _, run in found]}
    columns = {
        "Seed": [str(run.cell.seed) for _, run in found],
        "Rounds": [str(run.record.last_round) for _, run in found],
        "Reported round": [str(run.record.selected_round or "by site") for _, run in found],
        METRIC_TITLES[primary]: [UNKNOWN if score is None else f"{score:.2f}" for score, _ in found],
        "Time": [duration(run.record.seconds or 0.0) for _, run in found],
    }
    return sheet("Every finished run.", names, columns)


def _section(results: StudyResults, id: str, data: str) -> dict[str, Any]:
    """Everything about one data set."""
    rows, tables = results.of(data), tables_of(results, data)
    return {
        "id": id,
        "title": data or "Results",
        "tables": [(table.sheet_on_page(), table.tests_sheet() if table.comparisons else None) for table in tables],
        "sides": side_tables(results, data),
        "pictures": _pictures(results, rows, id),
        "undrawn": _undrawn(rows),
    }


def _pictures(results: StudyResults, rows: Sequence[RowResult], prefix: str) -> list[Picture]:
    federation = federation_of(rows)
    dropped = METRIC_TITLES[figures.retrogress_metric(results)]
    drawn = [
        ("scores", figures.scores(results, rows), _scores_caption(results, rows)),
        ("learning", figures.learning(results, rows), _learning_caption(results, rows)),
        (
            "recall",
            figures.rare_classes(rows),
            f"Recall of {_classes_drawn(rows)} over all {results.part} images; in brackets their training images"
            f"{_hollow(row.recall for row in rows)}.",
        ),
        (
            "retrogress",
            figures.retrogress_panels(results, rows),
            "Retrogress: what the model right after local training loses when the round ends, on validation data "
            f"({dropped}). Above zero, communication made models worse; zero throughout, where what predicts never "
            "leaves its site.",
        ),
        ("cost", figures.cost(rows), _cost_caption(rows)),
    ]
    if federation:
        start = federation.start
        caption = (
            f"Training images of each class at each site (seed {start.config.get('seed')}); the area of a bubble is "
            f"the count, 0 marks an absent class.{sites_shown(federation)}"
        )
        drawn.append(("federation", federation_bubbles(federation.training_sites, start.classes), caption))
    pictures = (picture(f"{prefix}-{name}", figure, caption) for name, figure, caption in drawn)
    return [each for each in pictures if each]


def _undrawn(rows: Sequence[RowResult]) -> str:
    """Why the curves of retrogress are missing; nothing where they are not."""
    runs = [run.record for row in rows for run in row.runs]
    scored = (run.evaluations for run in runs)
    if not runs or any(((each["view"] == "trained") & (each["part"] == "valid")).any() for each in scored):
        return ""
    why = ""
    if not any(run.start.config["evaluation"].get("trained", True) for run in runs):
        why = " (evaluation.trained = false)"
    elif not any(sum(site.valid) for run in runs for site in run.training_sites):
        why = ", for the sites have no validation images of their own"
    return f"No curves of retrogress: models were not scored right after local training{why}."


# ---- captions ----------------------------------------------------------------------------------------------------


def _ranks_caption(results: StudyResults) -> str:
    text = f"Ranks by {METRIC_TITLES[results.study.primary]}, mean over seeds"
    if any(row.runs and row.pooled for row in results.rows):
        text += ", pooled training apart"
    if results.ranked_over == "common set":
        text += ", on the one common set: ranks are the order of these means"
    else:
        text += f": a light dot for each {results.ranked_over}, a dark one for their mean"
    lacking = results.ranking.lacking.items()
    without = "; ".join(f"without {name}, which lacks {', '.join(blocks)}" for name, blocks in lacking)
    return f"{text}; {without}." if without else f"{text}."


def _scores_caption(results: StudyResults, rows: Sequence[RowResult]) -> str:
    text = f"{results.part.capitalize()} scores by method"
    if any(score.std is not None for row in rows for score in row.scores.values()):
        text += ": mean and standard deviation over seeds, each seed as a dash"
    text += _hollow(row.scores for row in rows)
    return f"{text}; the paper's number as a diamond." if any(row.row.paper for row in rows) else f"{text}."


def _hollow(scores: Iterable[Mapping[Any, Spread]]) -> str:
    """What a dot without a deviation looks like, where there are any."""
    return "; hollow: one seed" if any(score.std is None for own in scores for score in own.values()) else ""


def _classes_drawn(rows: Sequence[RowResult]) -> str:
    known = {name for row in rows for name in row.recall}
    return "the rarest classes" if len(known) > figures.MOST_CLASSES else "each class"


def _cost_caption(rows: Sequence[RowResult]) -> str:
    return " ".join(["Time and traffic by method, means over rounds and sites.", *shared_times(rows)])


def _learning_caption(results: StudyResults, rows: Sequence[RowResult]) -> str:
    metric, models = METRIC_TITLES[results.study.primary], MODELS_DRAWN[results.study.scope]
    means = "seeds" if all(run.on_common_set for row in rows for run in row.runs) else "sites and seeds"
    text = f"{metric} on validation data by round ({models}), mean over {means}, with a band of one standard deviation "
    text += "over seeds; the other methods in grey. Where the first rounds are far below the others they are cut."
    if any(figures.first_eligible(row) > 1 for row in rows):
        text += " From the dotted line on a round could be chosen."
    others = [row.row.name for row in rows if any(figures.curve_view(run, row) != row.view for run in row.runs)]
    if others:
        text += f" For {listed(others)} the models that chose the round: those reported were measured at the end."
    return text
