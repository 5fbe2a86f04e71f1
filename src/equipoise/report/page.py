"""The report as a page: tables and figures of one or several runs in one self-contained HTML file."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from equipoise.core.errors import UserError
from equipoise.core.storage import replacing
from equipoise.report import run_comparison as comparison
from equipoise.report.measured import EVERY
from equipoise.report.plotting import library
from equipoise.report.record import RunRecord, read_run
from equipoise.report.run_facts import costs, selection_note
from equipoise.report.run_figures import federation_bubbles
from equipoise.report.run_sections import Section, section, sections_of
from equipoise.report.run_tables import (
    group_titles,
    headline,
    run_labels,
    scores_sheet,
    to_csv,
    to_latex,
    unlike,
    with_worst_site,
)
from equipoise.report.sheet import sheet
from equipoise.report.thumbnails import overlays_sheet
from equipoise.report.wording import UNKNOWN, duration

#: what tells a report of runs from other files, reports of studies among them
KICKERS = ("Comparison of runs", "Report of a run")
MARK = re.compile(rf'<p class="kicker">({"|".join(KICKERS)})</p>')
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
    environment.filters |= {"duration": duration}
    environment.globals |= {"definitions": DEFINITIONS, "library": library}
    return environment.get_template(template).render(**values)


def write_report(runs: Sequence[Path | RunRecord], out: Path | None = None) -> Path:
    """Write the report of one run, or of several compared, and its headline table as CSV and LaTeX beside it.

    Default: `report.html` in the folder of a single run, `comparison.html` next to the first of several.
    """
    if not runs:
        raise UserError("A report needs at least one run folder: name a folder made by `equipoise run`.")
    records = [run if isinstance(run, RunRecord) else read_run(Path(run)) for run in runs]
    if out is None:
        first = records[0].folder.resolve()
        out = first / "report.html" if len(records) == 1 else first.parent / "comparison.html"
    elif out.is_file() and not MARK.search(out.read_text(encoding="utf-8", errors="replace")):
        raise UserError(f"{out} is there, and is no report: it would be replaced. Choose another --out")
    rows = headline(records)
    written = {".html": render(records, out.resolve().parent), ".csv": to_csv(rows), ".tex": to_latex(rows)}
    for suffix, text in written.items():
        _write(out if suffix == ".html" else out.with_suffix(suffix), text)
    return out


@dataclass(frozen=True)
class Group:
    """Sections under one title: a run of several, say. Without a title they stand for the whole page."""

    id: str
    title: str
    sections: Sequence[Section]


def render(runs: Sequence[RunRecord], folder: Path = Path()) -> str:
    """The HTML text of a report that lies in a folder, from which it links to overlays."""
    rows, labels = headline(runs), run_labels(runs)
    several = len(runs) > 1
    shared = several and comparison.same_federation(runs)
    groups = [Group("comparison", "Side by side", [_compare(runs, labels, shared)])] if several else []
    overlays = overlays_sheet(runs, labels, folder)
    groups += [Group("overlays", "Overlays", [section("", "", overlays)])] if overlays and several else []
    groups += [
        Group(f"run{place}", label if several else "", sections_of(run, shared, None if several else overlays))
        for place, (run, label) in enumerate(zip(runs, labels), start=1)
    ]
    names = ", ".join(labels[:-1]) + f" and {labels[-1]}" if len(labels) <= 5 else f"{len(labels)} runs"
    return page(
        "report.html",
        Path(__file__).parent,
        kicker=KICKERS[0 if several else 1],
        title=names if several else runs[0].start.run,
        finding=comparison.finding(runs, labels),
        lead=comparison.leading(runs, labels),
        groups=groups,
        csv=_data_link(to_csv(rows), "text/csv"),
        latex=_data_link(to_latex(rows), "text/x-tex"),
        version=runs[0].start.version,
    )


def _compare(runs: Sequence[RunRecord], labels: Sequence[str], shared: bool) -> Section:
    """What stands in front of the single runs when there are several."""
    rows, groups = group_titles(headline(runs))
    caption = "Results of all runs, per cent. Nothing is bold: one run each cannot tell methods apart."
    scores = with_worst_site(scores_sheet(caption, rows, {"Run": "label", "View": "view"}, groups=groups), rows)
    spent = pd.DataFrame([costs(run) for run in runs]).fillna(UNKNOWN)
    notes = [f"{label}: {selection_note(run)}" for run, label in zip(runs, labels)]
    return section(
        "",
        "",
        scores,
        ("list", [text for text in (unlike(rows), *notes) if text]),
        comparison.overlaid_learning(runs, labels),
        comparison.overlaid_retrogress(runs, labels),
        federation_bubbles(runs[0]) if shared else None,
        sheet("Cost of the runs. Traffic per round is the mean over sites.", {"Run": labels}, dict(spent)),
    )


def _data_link(text: str, kind: str) -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _write(path: Path, text: str) -> None:
    """Write a file of the report where the user wants it; a folder that is not there is likely misspelt."""
    try:
        with replacing(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}. Choose another place with --out.") from error
