"""The scores of a run with intervals over groups of its images, as a table of its report."""

from __future__ import annotations

from equipoise.bootstrap import CONFIDENCE, Interval
from equipoise.engine.image_scores import FILE
from equipoise.evidence.recomputed import Scored, read_predictions, scores_of
from equipoise.metrics import METRICS
from equipoise.report.record import RunRecord
from equipoise.report.run_tables import SCOPE_TITLES
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.wording import UNKNOWN

#: sites of which each has a line
MOST_SITES = 20
SHOWN = [metric for metric in METRICS if metric.in_tables]
#: with more images than this, areas under curves would take long
MOST_IMAGES = 10_000
NOTE = (
    "Groups of images (lesions, patients; without groups, images) were drawn a thousand times with replacement within "
    "each site. Where a class has fewer than about ten groups, an interval is too narrow. Scores are made anew from "
    "the run's predictions."
)


def interval_sheet(run: RunRecord) -> Sheet | None:
    """Scores and bounds in per cent by view and place; None where the run kept no predictions of single images."""
    if not (run.folder / FILE).exists():
        return None
    predictions = read_predictions(run.folder)
    split = "test" if len(run.finals) else "valid"
    chosen = predictions.where(predictions.columns["split"] == split)
    if not len(chosen):
        return None
    shown = [metric for metric in SHOWN if metric.needs != "auc" or len(chosen) <= MOST_IMAGES]
    found = [*scores_of(chosen, intervals=[metric.name for metric in shown])]
    if sum(one.scope == "site" for one in found) > MOST_SITES:
        found = [one for one in found if one.scope != "site"]
    names = {"View": [one.view for one in found], "Scope": [_title(one) for one in found]}
    columns = {metric.title: [bounds_told(one.intervals[metric.name]) for one in found] for metric in shown}
    return sheet(f"Scores with {CONFIDENCE:.0%} intervals over images, per cent.", names, columns, notes=[NOTE])


def _title(one: Scored) -> str:
    return one.site or SCOPE_TITLES[one.scope]


def bounds_told(found: Interval) -> str:
    """A score and its bounds in per cent."""
    if found.value != found.value:
        return UNKNOWN
    return f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"
