"""The report as a page: tables and figures of one or several runs in one self-contained HTML file."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from equipoise.core.errors import UserError
from equipoise.core.storage import replacing
from equipoise.report import run_comparison as comparison
from equipoise.report import run_figures
from equipoise.report.action_tables import action_sheet
from equipoise.report.curves import retrogress
from equipoise.report.example_images import examples_of
from equipoise.report.interval_tables import interval_sheet
from equipoise.report.measured import EVERY, in_words, main_metric
from equipoise.report.overlays import Overlay, overlays_of
from equipoise.report.plotting import library
from equipoise.report.prediction_figures import prediction_curves
from equipoise.report.record import RunRecord, read_run
from equipoise.report.run_facts import costs, key_numbers, left_out, selection_note, work_by_site
from equipoise.report.run_tables import (
    COLUMNS,
    SITE_COLUMNS,
    group_titles,
    headline,
    run_labels,
    scores_sheet,
    to_csv,
    to_latex,
    told,
    unlike,
)
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.volume_figures import dice_boxes, worst_cases
from equipoise.report.wording import UNKNOWN, duration, traffic

#: what tells a report of runs from other files, reports of studies among them
KICKERS = ("Comparison of runs", "Report of a run")
MARK = re.compile(rf'<p class="kicker">({"|".join(KICKERS)})</p>')
RUN_FIGURES = {
    "learning": run_figures.learning_curves,
    "retrogress": run_figures.retrogress_curves,
    "work": run_figures.work_figure,
    "recall": run_figures.recall_map,
    "confusion": run_figures.confusion_matrices,
    "volumes": dice_boxes,
    "predictions": prediction_curves,
    "sites": run_figures.site_pages,
    "federation": run_figures.federation_bubbles,
    "traffic": run_figures.traffic_per_round,
}
#: what a heading means, told on hover and to screen readers
DEFINITIONS = {metric.title: metric.meaning for metric in EVERY} | {
    "Worst site": "Lowest score of a site: balanced accuracy, or Dice.",
    "Spread over sites": "Standard deviation over all sites of balanced accuracy, or Dice.",
    "View": "Global: one model for all sites. Personal: each site's own model. Trained: a site's model right after "
    "local training.",
    "Model": "Global: one model for all sites. Personal: each site's own model. Trained: a site's model right after "
    "local training.",
    "Scope": "Mean over sites: each site counts once. Pooled: each image counts once. Cohort: images of a place that "
    "does not train.",
    "Retrogress": "What a site's model loses when the round ends.",
    "Seeds": "How many runs with different random seeds the numbers are means of.",
    "Holm": "The p-value before it, corrected for the number of comparisons.",
}


def page(template: str, folder: Path, **values: Any) -> str:
    """The HTML text of a template, which may extend and include those of reports."""
    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "traffic": traffic}
    environment.globals |= {"definitions": DEFINITIONS, "library": library}
    return environment.get_template(template).render(**values)


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one run, or of several compared, and its headline table as CSV and LaTeX beside it.

    Default: `report.html` in the folder of a single run, `comparison.html` next to the first of several.
    """
    if not runs:
        raise UserError("A report needs at least one run folder: name a folder made by `equipoise run`.")
    records = [read_run(Path(run)) for run in runs]
    if out is None:
        first = records[0].folder.resolve()
        out = first / "report.html" if len(records) == 1 else first.parent / "comparison.html"
    elif out.is_file() and not MARK.search(out.read_text(encoding="utf-8", errors="replace")):
        raise UserError(f"{out} is there, and is no report: it would be replaced. Choose another --out")
    rows = headline(records)
    shown = overlays_of(records, out.resolve().parent)
    written = {".html": render(records, shown), ".csv": to_csv(rows), ".tex": to_latex(rows)}
    for suffix, text in written.items():
        _write(out if suffix == ".html" else out.with_suffix(suffix), text)
    return out


def render(runs: Sequence[RunRecord], overlays: Sequence[Sequence[Overlay]] = ()) -> str:
    """The HTML text of a report, with links to overlays of each run where there are any."""
    rows, labels = headline(runs), run_labels(runs)
    shared = len(runs) > 1 and comparison.same_federation(runs)
    return page(
        "report.html",
        Path(__file__).parent,
        kickers=KICKERS,
        overlays=[*zip(*overlays)],
        labels=labels,
        main=in_words(runs[0]),
        main_title=main_metric(runs[0]).title,
        finding=comparison.finding(runs, labels),
        lead={"id": "lead", "figures": {"lead": comparison.leading(runs, labels)}},
        compared=_compare(runs, labels, shared) if len(runs) > 1 else None,
        sections=[
            {"label": label} | _section(run, f"run{place}", undrawn=["federation"] if shared else [])
            for place, (run, label) in enumerate(zip(runs, labels), start=1)
        ],
        csv=_data_link(to_csv(rows), "text/csv"),
        latex=_data_link(to_latex(rows), "text/x-tex"),
        version=runs[0].start.version,
    )


def _compare(runs: Sequence[RunRecord], labels: Sequence[str], shared: bool) -> dict[str, Any]:
    """What stands in front of the single runs when there are several."""
    rows, groups = group_titles(headline(runs))
    caption = "Results of all runs, per cent. Nothing is bold: one run each cannot tell methods apart."
    scores = scores_sheet(caption, rows, {"Run": "label", "View": "view"})
    spent = pd.DataFrame([costs(run) for run in runs]).fillna(UNKNOWN)
    return {
        "id": "comparison",
        "scores": _with_worst_site(scores, rows),
        "groups": groups,
        "unlike": unlike(rows),
        "costs": sheet("Cost of the runs. Traffic per round is the mean over sites.", {"Run": labels}, dict(spent)),
        "figures": {
            "learning": comparison.overlaid_learning(runs, labels),
            "retrogress": comparison.overlaid_retrogress(runs, labels),
            "federation": run_figures.federation_bubbles(runs[0]) if shared else None,
        },
    }


def _section(run: RunRecord, id: str, undrawn: Sequence[str]) -> dict[str, Any]:
    """Everything the template shows of one run."""
    kind = "Test results" if len(run.finals) else f"Validation scores{'' if run.finished else ' so far'}"
    rows, every = headline([run]), told(run)
    scores = scores_sheet(f"{kind}, per cent.", rows, {"View": "view", "Scope": "title"})
    of_site = every[every["scope"].isin(["site", "cohort"])]
    names = {"View": "view", "Site": "site"}
    return {
        "id": id,
        "run": run,
        "main": in_words(run),
        "key_numbers": key_numbers(run),
        "sheets": {
            "scores": _with_worst_site(scores, rows),
            "sites": scores_sheet("The same by site, per cent.", of_site, names, SITE_COLUMNS),
            "intervals": interval_sheet(run),
            "actions": action_sheet(run),
            "work": work_by_site(run),
            "worst": worst_cases(run),
            "left_out": _left_out(run),
            "disclosure": _disclosure(run),
        },
        "note": selection_note(run),
        "retrogress_known": not retrogress(run).empty,
        "figures": {name: None if name in undrawn else draw(run) for name, draw in RUN_FIGURES.items()},
        "examples": examples_of(run),
        "averaged": run_figures.averaged_note(run),
        "config": run.config_text or json.dumps(run.start.config, indent=2, ensure_ascii=False),
    }


def _left_out(run: RunRecord) -> Sheet | None:
    absences = left_out(run)
    if not absences:
        return None
    sites, rounds, why = zip(*absences)
    return sheet("Sites left out of a round, and why.", {"Site": sites, "Rounds": rounds, "Why": why}, {})


def _disclosure(run: RunRecord) -> Sheet:
    """What leaves a site."""
    method, told = run.start.method, run.start.disclosure
    text = f"What a site replies in a run of {method}; counts of images and of predictions leave it as well."
    if "evaluate" in told or "pool" in told:
        text = f"What leaves a site in a run of {method}. Nothing else does."
    lines = [(action, key, what) for action, sent in told.items() for key, what in sent.items()]
    columns = zip(*lines) if lines else ((), (), ())
    return sheet(text, dict(zip(("Action", "Sent", "What it is"), columns)), {})


def _with_worst_site(shown: Sheet, rows: pd.DataFrame) -> Sheet:
    """The sheet with the name of the worst site under its score."""
    worst = next(column.title for column in COLUMNS if column.name == "worst_site")
    named = [
        Markup("{}<small>{}</small>").format(text, name) if pd.notna(name) else text
        for text, name in zip(shown.cells[worst], rows["worst"])
    ]
    return dataclasses.replace(shown, cells=shown.cells.assign(**{worst: named}))


def _data_link(text: str, kind: str) -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _write(path: Path, text: str) -> None:
    """Write a file of the report where the user wants it; a folder that is not there is likely misspelt."""
    try:
        with replacing(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}. Choose another place with --out.") from error
