"""The scores of a run with intervals over groups of its images, as a table of its report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

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
    found = [*resampled(run)]
    if not found:
        return None
    if sum(one.scope == "site" for one in found) > MOST_SITES:
        found = [one for one in found if one.scope != "site"]
    shown = [metric for metric in SHOWN if metric.name in found[0].intervals]
    names = {"View": [one.view for one in found], "Scope": [_title(one) for one in found]}
    columns = {metric.title: [bounds_told(one.intervals[metric.name]) for one in found] for metric in shown}
    return sheet(f"Scores with {CONFIDENCE:.0%} intervals over images, per cent.", names, columns, notes=[NOTE])


def resampled(run: RunRecord) -> Sequence[Scored]:
    """The scores of a run's predictions with their intervals; none where it kept no predictions."""
    file = run.folder / FILE
    if not file.exists():
        return ()
    return _resampled(run.folder, file.stat().st_mtime_ns, "test" if len(run.finals) else "valid")


@lru_cache(maxsize=64)
def _resampled(folder: Path, written: int, split: str) -> Sequence[Scored]:
    """The same, made once for the table and the figures of a page; `written` is when the file was."""
    predictions = read_predictions(folder)
    chosen = predictions.where(predictions.columns["split"] == split)
    shown = [metric for metric in SHOWN if metric.needs != "auc" or len(chosen) <= MOST_IMAGES]
    return tuple(scores_of(chosen, intervals=[metric.name for metric in shown])) if len(chosen) else ()


def _title(one: Scored) -> str:
    return one.site or SCOPE_TITLES[one.scope]


def bounds_told(found: Interval) -> str:
    """A score and its bounds in per cent."""
    if found.value != found.value:
        return UNKNOWN
    return f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"
