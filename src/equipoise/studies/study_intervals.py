"""Intervals of a study's rows over images and seeds, and each row's difference from the best, in per cent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.bootstrap import CONFIDENCE
from equipoise.engine.image_scores import FILE, Predictions
from equipoise.evidence.paired import QUICK, RowEvidence, SharedResamples, compared
from equipoise.evidence.recomputed import read_predictions
from equipoise.report.measured import EVERY, TITLES
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.wording import UNKNOWN, bounds_told
from equipoise.studies.rows import RowResult

HIGHER = {metric.name: metric.higher_is_better for metric in EVERY}
HOW = (
    f"Bounds of {CONFIDENCE:.0%} intervals: groups of images (lesions, patients; without groups, images) are drawn "
    "with replacement within each site, and so are seeds. All rows share their resamples. P(better): share of "
    "resamples in which a row beats the best one. d: difference in standard deviations of the seeds' differences. The "
    "choice of the best row is not corrected for."
)


@dataclass(frozen=True)
class StudyIntervals:
    """The resampled scores of the rows of one data set that kept predictions, by name.

    Args:
        best: the row with the highest mean of the primary metric (the lowest, where that is good)
    """

    rows: Mapping[str, RowEvidence]
    metrics: Sequence[str]
    best: str

    def summary(self, name: str) -> dict[str, Any]:
        """What summary.json says of a row: bounds of each metric, and the difference from the best row."""
        row = self.rows.get(name)
        if row is None:
            return {}
        bounds = {metric: row.interval(metric) for metric in self.metrics}
        told: dict[str, Any] = {
            "intervals": {metric: {"low": 100 * own.low, "high": 100 * own.high} for metric, own in bounds.items()}
        }
        found = compared(row, self.rows[self.best], self.metrics[0]) if name != self.best else None
        if found is not None:
            gap = found.difference
            told["to_best"] = {
                "best": self.best,
                "difference": 100 * gap.value,
                "low": 100 * gap.low,
                "high": 100 * gap.high,
                "probability": found.probability if HIGHER[self.metrics[0]] else 1 - found.probability,
                "effect": None if found.effect != found.effect else found.effect,
            }
        return told

    def sheet(self) -> Sheet:
        """The intervals as a table."""
        told = {name: self.summary(name) for name in self.rows}
        columns: dict[str, list[str]] = {}
        for metric in self.metrics:
            columns[TITLES[metric]] = [bounds_told(row.interval(metric)) for row in self.rows.values()]
        gaps = [own.get("to_best") for own in told.values()]
        title = f"{TITLES[self.metrics[0]]}, to {self.best}"
        columns[title] = [
            UNKNOWN if gap is None else f"{gap['difference']:+.1f} ({gap['low']:+.1f} to {gap['high']:+.1f})"
            for gap in gaps
        ]
        columns["P(better)"] = [UNKNOWN if gap is None else f"{gap['probability']:.2f}" for gap in gaps]
        columns["d"] = [UNKNOWN if gap is None or gap["effect"] is None else f"{gap['effect']:+.1f}" for gap in gaps]
        return sheet("Intervals over images and seeds, per cent.", {"Method": [*self.rows]}, columns, notes=[HOW])


def study_intervals(rows: Sequence[RowResult], metrics: Sequence[str], part: str) -> StudyIntervals | None:
    """The intervals of rows on one data set; None where no run has kept predictions of what the rows report.

    Args:
        metrics: those of the study, the first of which compares rows; only quick ones are resampled
        part: the images whose scores are shown
    """
    shown = [metric for metric in metrics if metric in QUICK]
    if not shown or shown[0] != metrics[0]:
        return None
    runs = {row.row.name: _predictions(row) for row in rows if row.view != "trained"}
    shared = SharedResamples({name: own for name, own in runs.items() if own}, part)
    found = {row.row.name: shared.row(row.row.name, row.view, shown) for row in rows if runs.get(row.row.name)}
    known = {name: own for name, own in found.items() if own is not None}
    choices = [row.row.name for row in rows if row.row.name in known and not row.pooled] or [*known]
    if not known:
        return None
    sign = 1 if HIGHER[shown[0]] else -1
    return StudyIntervals(
        known, shown, max(choices, key=lambda name: sign * float(known[name].values[shown[0]].mean()))
    )


def _predictions(row: RowResult) -> dict[int, list[Predictions]]:
    """The predictions of a row's runs by seed, of each fold; nothing where a run has none."""
    found: dict[int, list[Predictions]] = {}
    for run in row.runs:
        if not (run.cell.folder / FILE).exists():
            return {}
        found.setdefault(run.cell.seed, []).append(read_predictions(run.cell.folder))
    return found
