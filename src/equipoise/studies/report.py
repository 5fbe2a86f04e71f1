"""What a study leaves behind, written anew from its runs: summary, tables, database, and the report as one page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from equipoise import report
from equipoise.core.storage import write_text
from equipoise.core.version import __version__
from equipoise.report.figures import federation_bubbles, sites_shown
from equipoise.report.page import Picture, picture
from equipoise.report.plotting import style
from equipoise.report.summary import duration
from equipoise.report.tables import METRIC_TITLES
from equipoise.statistics import Spread
from equipoise.studies import figures, remarks
from equipoise.studies.cost import shared_times
from equipoise.studies.database import write_database
from equipoise.studies.exported import to_csv, to_latex, to_markdown
from equipoise.studies.grid import listed
from equipoise.studies.results import StudyResults
from equipoise.studies.rows import RowResult, federation_of
from equipoise.studies.summary import summary
from equipoise.studies.table import StudyTable, number, side_tables, tables_of, tables_to_come

#: by scope, whose learning is drawn
MODELS_DRAWN = {
    "sites": "personal models where a method has them, else the global one",
    "trained": "models right after local training, where a method has such",
    "common": "the global model, where a method has one",
}


def write_study(results: StudyResults, folder: Path) -> None:
    """Write everything that follows from the finished runs of a study into its folder."""
    write_text(folder / "summary.json", json.dumps(summary(results), indent=1, ensure_ascii=False))
    write_text(folder / "table.csv", to_csv(results))
    write_text(folder / "table.tex", to_latex(results))
    write_text(folder / "table.md", to_markdown(results))
    write_database(results, folder / "study.sqlite")
    write_text(folder / "report.html", render(results))


def render(results: StudyResults) -> str:
    """The HTML text of the report."""
    environment = Environment(
        loader=FileSystemLoader([Path(__file__).parent, Path(report.__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with style():
        sections = [_section(results, place, data) for place, data in enumerate(results.data_names, start=1)]
        ranks = picture("ranks", figures.rank_plot(results), _ranks_caption(results))
        over_data = picture("over-data", figures.over_data(results), _over_data_caption(results))
    return environment.get_template("study.html").render(
        study=results.study,
        results=results,
        facts=_facts(results),
        not_run=remarks.not_run(results),
        warnings=remarks.warnings(results.rows),
        sections=sections,
        ranks=ranks,
        over_data=over_data,
        runs=_runs(results),
        titles=METRIC_TITLES,
        number=number,
        version=__version__,
    )


def _facts(results: StudyResults) -> list[tuple[str, str | Sequence[str]]]:
    """What stands at the top, by name: a text, or a list of them."""
    study, runs = results.study, results.runs
    at_a_time = max((run.together for run in runs), default=1)
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
        (
            "Time",
            duration(sum(run.record.seconds or 0.0 for run in runs))
            + (f" added up over all runs, up to {at_a_time} at a time" if at_a_time > 1 else " over all runs"),
        ),
    ]
    return [(name, value) for name, value in entries if value]


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


def _over_data_caption(results: StudyResults) -> str:
    return f"{METRIC_TITLES[results.study.primary]} by data set, mean over seeds, with a deviation over seeds."


def _runs(results: StudyResults) -> list[tuple[Any, str, str]]:
    found = []
    for row in results.rows:
        scores = row.values(results.study.primary, by_site=False)
        for run in row.runs:
            score = scores.get(run.cell.seed)
            text = "–" if score is None else f"{score:.2f}"
            found.append((run, text, duration(run.record.seconds or 0.0)))
    return found


def _section(results: StudyResults, place: int, data: str) -> dict[str, Any]:
    """Everything about one data set."""
    rows = results.of(data)
    return {
        "id": f"data{place}",
        "title": data or "Results",
        "tables": [_table(table) for table in tables_of(results, data)],
        "sides": side_tables(results, data),
        "pictures": _pictures(results, rows, f"data{place}"),
        "undrawn": _undrawn(rows),
    }


def _table(table: StudyTable) -> dict[str, Any]:
    return {
        "caption": table.caption,
        "heads": table.heads,
        "validation": _validation_title(table.rows),
        "notes": table.notes(alone=False),
        "tests": table.comparisons,
        "rows": [
            (row, [(table.cell(row, column), table.is_best(row, column)) for column in table.columns])
            for row in table.rows
        ],
    }


def _validation_title(rows: Sequence[RowResult]) -> str:
    """The column of the scores that chose rounds, by the metric that did."""
    chosen = [selection for row in rows for run in row.runs if (selection := run.record.selection)]
    metrics = dict.fromkeys(METRIC_TITLES.get(selection.metric, selection.metric) for selection in chosen)
    return f"{' or '.join(metrics)}, validation" if metrics else "Validation"


def _pictures(results: StudyResults, rows: Sequence[RowResult], prefix: str) -> list[Picture]:
    federation = federation_of(rows)
    drawn = [
        picture(
            f"{prefix}-scores",
            figures.scores(results, rows),
            _scores_caption(results, rows),
        ),
        picture(
            f"{prefix}-learning",
            figures.learning(results, rows),
            _learning_caption(results, rows),
        ),
        picture(
            f"{prefix}-recall",
            figures.rare_classes(rows),
            f"Recall of {_classes_drawn(rows)} over all {results.part} images; in brackets their training images"
            f"{_hollow(row.recall for row in rows)}.",
        ),
        picture(
            f"{prefix}-retrogress",
            figures.retrogress_panels(results, rows),
            "Retrogress: what the model right after local training loses when the round ends, on validation data "
            f"({METRIC_TITLES[figures.retrogress_metric(results)]}). Above zero, communication made models worse; zero "
            "throughout, where what predicts never leaves its site.",
        ),
        picture(
            f"{prefix}-cost",
            figures.cost(rows),
            _cost_caption(rows),
        ),
        picture(
            f"{prefix}-federation",
            federation_bubbles(federation.training_sites, federation.start.classes),
            f"Training images of each class at each site (seed {federation.start.config.get('seed')}); the area of a "
            f"bubble is the count, 0 marks an absent class.{sites_shown(federation)}",
        )
        if federation
        else None,
    ]
    return [each for each in drawn if each]


def _undrawn(rows: Sequence[RowResult]) -> str:
    """Why the curves of retrogress are missing; nothing where they are not."""
    runs = [run.record for row in rows for run in row.runs]
    if not runs or any(scored.view == "trained" and scored.part == "valid" for r in runs for scored in r.evaluations):
        return ""
    why = ""
    if not any(run.start.config["evaluation"].get("trained", True) for run in runs):
        why = " (evaluation.trained = false)"
    elif not any(sum(site.valid) for run in runs for site in run.training_sites):
        why = ", for the sites have no validation images of their own"
    return f"No curves of retrogress: models were not scored right after local training{why}."


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
