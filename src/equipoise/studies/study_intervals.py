"""Intervals of a study's rows over images and seeds, and each row's difference from the best, in per cent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.bootstrap import CONFIDENCE
from equipoise.engine.image_scores import FILE, Predictions
from equipoise.evidence.paired import RowEvidence, SharedResamples, compared, resampled_metrics
from equipoise.evidence.recomputed import read_predictions
from equipoise.report.measured import EVERY, TITLES
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.wording import UNKNOWN, bounds_told
from equipoise.studies.rows import RowResult

HIGHER_IS_BETTER = {metric.name: metric.higher_is_better for metric in EVERY}
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

    def bounds(self, name: str, metric: str) -> tuple[float, float] | None:
        """The interval of a row's mean, in per cent; None where it is not known."""
        if name not in self.rows or metric not in self.metrics:
            return None
        found = self.rows[name].interval(metric)
        return None if found.low != found.low else (100 * found.low, 100 * found.high)

    def summary(self, name: str) -> dict[str, Any]:
        """What summary.json says of a row: bounds of each metric, and the difference from the best row."""
        if name not in self.rows:
            return {}
        known = {metric: ends for metric in self.metrics if (ends := self.bounds(name, metric))}
        told: dict[str, Any] = {
            "intervals": {metric: dict(zip(("low", "high"), ends)) for metric, ends in known.items()}
        }
        primary = self.metrics[0]
        found = compared(self.rows[name], self.rows[self.best], primary) if name != self.best else None
        if found is not None:
            gap = {key: 100 * getattr(found.difference, key) for key in ("value", "low", "high")}
            told["to_best"] = {
                "best": self.best,
                "difference": gap.pop("value"),
                **gap,
                "probability": found.probability,
                "effect": None if found.effect != found.effect else found.effect,
            }
        return told

    def sheet(self) -> Sheet:
        """The intervals as a table."""
        columns: dict[str, list[str]] = {}
        for metric in self.metrics:
            columns[TITLES[metric]] = [bounds_told(row.interval(metric)) for row in self.rows.values()]
        gaps = [self.summary(name).get("to_best") for name in self.rows]
        forms = {
            f"{TITLES[self.metrics[0]]}, to {self.best}": "{difference:+.1f} ({low:+.1f} to {high:+.1f})",
            "P(better)": "{probability:.2f}",
            "d": "{effect:+.1f}",
        }
        for title, form in forms.items():
            known = [gap if gap and (title != "d" or gap["effect"] is not None) else None for gap in gaps]
            columns[title] = [form.format(**gap) if gap else UNKNOWN for gap in known]
        return sheet("Intervals over images and seeds, per cent.", {"Method": [*self.rows]}, columns, notes=[HOW])


def study_intervals(rows: Sequence[RowResult], metrics: Sequence[str], part: str) -> StudyIntervals | None:
    """The intervals of rows on one data set; None where no run has kept predictions of what the rows report.

    Args:
        metrics: those of the study; the first one compares rows
        part: the images whose scores are shown
    """
    kept = {row.row.name: _predictions(row) for row in rows if row.view != "trained"}
    runs = {name: own for name, own in kept.items() if own}
    images = sum(len(fold) for seeds in runs.values() for folds in seeds.values() for fold in folds)
    resampled = resampled_metrics(images)
    shown = [metric for metric in metrics if metric in resampled]
    if not runs or metrics[0] not in resampled:
        return None
    shared = SharedResamples(runs, part)
    found = {row.row.name: shared.row(row.row.name, row.view, shown) for row in rows if row.row.name in runs}
    known = {name: own for name, own in found.items() if own is not None}
    choices = [row.row.name for row in rows if row.row.name in known and not row.pooled] or [*known]
    if not known:
        return None
    sign = 1 if HIGHER_IS_BETTER[shown[0]] else -1
    best = max(choices, key=lambda name: sign * float(known[name].values[shown[0]].mean()))
    return StudyIntervals(known, shown, best)


def _predictions(row: RowResult) -> dict[int, list[Predictions]]:
    """The predictions of a row's runs by seed, of each fold; nothing where a run has none."""
    found: dict[int, list[Predictions]] = {}
    for run in row.runs:
        if not (run.cell.folder / FILE).exists():
            return {}
        found.setdefault(run.cell.seed, []).append(read_predictions(run.cell.folder))
    return found
