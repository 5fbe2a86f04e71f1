"""What stands beside a study's tables of scores: sites, unseen cohorts, images, costs."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.report.measured import TITLES, unit_of
from equipoise.report.sheet import Sheet, sheet
from equipoise.studies.results import StudyResults, once, selection_rule
from equipoise.studies.row_cost import COLUMNS, cost_caption, cost_cells
from equipoise.studies.rows import RowResult, federation_of
from equipoise.studies.score_tables import decimals, number, paper_title, seeds_note

#: the most sites whose images are counted in a table
MOST_SITES = 12
PARTS = {"train": "training", "valid": "validation", "test": "test"}


@once
def side_tables(results: StudyResults, data: str) -> list[Sheet]:
    """All of them, in order; captions name the data set where the study has several."""
    rows = [row for row in results.of(data) if row.runs]
    cohorts = dict.fromkeys(cohort for row in rows for cohort in row.places("cohort"))
    intervals = results.intervals[data]
    every = [
        intervals.sheet() if intervals else None,
        _sites(results, rows),
        *(_cohort(results, rows, cohort) for cohort in cohorts),
        _counts(rows),
        _costs(rows),
    ]
    named = f"{data}: " if data else ""
    return [Sheet(f"{named}{own.caption}", own.cells, notes=own.notes) for own in every if own]


def _names(rows: Sequence[RowResult]) -> dict[str, list[str]]:
    return {"Method": [row.row.name for row in rows]}


def _notes(results: StudyResults, rows: Sequence[RowResult]) -> list[str]:
    """How rounds were chosen, and what numbers are means of."""
    return [selection_rule((run for row in rows for run in row.runs), results.study.part), *seeds_note(rows)]


def _sites(results: StudyResults, rows: Sequence[RowResult]) -> Sheet | None:
    """The primary metric by site, where sites are tested apart."""
    primary = results.study.primary
    sites = list(dict.fromkeys(site for row in rows for site in row.places("site")))
    if results.study.scope == "common" or len(sites) < 2:
        return None
    scores = {site: [number(row.scores_of(row.view, "site", site).get(primary)) for row in rows] for site in sites}
    return sheet(f"{TITLES[primary]} by site.", _names(rows), scores, notes=_notes(results, rows))


def _cohort(results: StudyResults, rows: Sequence[RowResult], cohort: str) -> Sheet:
    """An unseen cohort: the personal model of the first site, or else the global model."""
    study = results.study
    views = [row.places("cohort").get(cohort, "") for row in rows]
    scores = [row.scores_of(view, "cohort", cohort) for row, view in zip(rows, views)]
    columns = {"Model": views}
    columns |= {TITLES[metric]: [number(own.get(metric)) for own in scores] for metric in study.metrics}
    papers = [metric for metric in study.kept_metrics if any(metric in row.row.paper_cohort for row in rows)]
    for metric in papers:
        known = [other.paper_cohort.get(metric) for other in study.rows]
        told = [decimals(row.row.paper_cohort.get(metric), known) for row in rows]
        columns[paper_title(results, metric)] = told
    first = rows[0].runs[0].start.config.get("data", {}).get("leave_out") != cohort
    whose = "the personal model of the first site" if first else "the mean of all sites' personal predictions"
    text = f"The unseen cohort {cohort}: {whose}, or else the global model. Per cent."
    if papers and study.cohort_table:
        text = f"The paper's {study.cohort_table}. {text}"
    return sheet(text, _names(rows), columns, notes=_notes(results, rows))


def _counts(rows: Sequence[RowResult]) -> Sheet | None:
    """Images of each class in each part at the sites that score models, where they are few enough to read."""
    start = federation_of(rows)
    if start is None:
        return None
    images = start.images[(start.images[["valid", "test"]] > 0).any(axis=1)]
    if not 0 < len(images) <= MOST_SITES:
        return None
    parts = [part for part in PARTS if images[part].any(axis=None)]
    cells = {name: zip(*(images[part, name].map("{:,}".format) for part in parts)) for name in start.classes}
    what = " / ".join(PARTS[part] for part in parts)
    unit, seed = unit_of(start).capitalize(), start.config.get("seed")
    text = f"{unit} of each class where models are scored: {what} (seed {seed})."
    return sheet(text, {"Site": images.index}, {name: map(" / ".join, counts) for name, counts in cells.items()})


def _costs(rows: Sequence[RowResult]) -> Sheet | None:
    """What each row costs."""
    if not rows:
        return None
    columns = dict(zip(COLUMNS, zip(*(cost_cells(row, rows) for row in rows))))
    return sheet(cost_caption(rows), _names(rows), {title: list(texts) for title, texts in columns.items()})
