"""Methods compared on the same images: intervals over groups and seeds, and paired differences between methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from equipoise.bootstrap import DRAWS, Interval, PairedDifference, generator_of, interval, over_seeds, paired
from equipoise.engine.image_scores import Predictions
from equipoise.evidence.recomputed import Weights, joined, mean_resamples, models, scores_of, sites_together
from equipoise.metrics import METRICS
from equipoise.tallies import Floats

#: metrics of which a thousand resamples cost milliseconds, by what they need
QUICK = ("confusion", "calibration")
#: predictions of which areas under curves are resampled, in about twenty seconds; more would take minutes
MOST_IMAGES = 200_000
#: scores of which the lowest is best
LOW = tuple(metric.name for metric in METRICS if not metric.higher_is_better)
#: the highest score that there can be
MOST = {metric.name: metric.most for metric in METRICS}


def resampled_metrics(images: int) -> tuple[str, ...]:
    """The metrics of tables whose intervals are made of so many predictions at a fair cost."""
    return tuple(m.name for m in METRICS if m.in_tables and (m.needs in QUICK or images <= MOST_IMAGES))


@dataclass(frozen=True)
class RowEvidence:
    """One method's scores by seed, with their resamples.

    Args:
        values: by metric, (S,) in the order of `seeds`
        resamples: by metric, (S, B)
    """

    seeds: tuple[int, ...]
    values: Mapping[str, Floats]
    resamples: Mapping[str, Floats]

    def interval(self, metric: str) -> Interval:
        """The interval of the mean over seeds; groups of images are drawn, and seeds where there are several.

        It ends where scores do: deviations of few seeds, which are widened, may lead beyond.
        """
        drawn = over_seeds(self.resamples[metric], generator_of("seeds"))
        found = interval(float(np.mean(self.values[metric])), drawn)
        low, high = np.clip([found.low, found.high], 0.0, MOST[metric])
        return Interval(found.value, float(low), float(high))

    def of(self, seeds: Sequence[int]) -> RowEvidence:
        """The same of some of its seeds."""
        places = [self.seeds.index(seed) for seed in seeds]
        values = {name: own[places] for name, own in self.values.items()}
        return RowEvidence(tuple(seeds), values, {name: own[places] for name, own in self.resamples.items()})


def compared(first: RowEvidence, second: RowEvidence, metric: str) -> PairedDifference | None:
    """How much higher the first method's score is, over the seeds that both have; None where they share none.

    The probability is that of the better score: the lower one, where low is good.
    """
    seeds = [seed for seed in first.seeds if seed in second.seeds]
    if not seeds:
        return None
    rows = [row.of(seeds) for row in (first, second)]
    drawn = [over_seeds(row.resamples[metric], generator_of("seeds")) for row in rows]
    found = paired(*drawn, *(row.values[metric] for row in rows))
    return found if metric not in LOW else replace(found, probability=1 - found.probability)


class SharedResamples:
    """Runs that are compared: all of their models meet the same resamples of the images.

    Args:
        runs: predictions by row and seed, of each fold; the mean over the folds of a seed is compared
        split: the images whose scores are compared
    """

    def __init__(self, runs: Mapping[str, Mapping[int, Sequence[Predictions]]], split: str, draws: int = DRAWS):
        self.runs = {
            row: {seed: [_of_split(fold, split) for fold in folds] for seed, folds in sorted(seeds.items())}
            for row, seeds in runs.items()
        }
        self.draws = draws

    @cached_property
    def weights(self) -> Weights:
        """The resamples of all groups that any run has."""
        every = [fold for seeds in self.runs.values() for folds in seeds.values() for fold in folds]
        return Weights(every, self.draws)

    def row(self, name: str, view: str, metrics: Sequence[str], scope: str = "mean") -> RowEvidence | None:
        """The scores of a row's view as the mean over sites, or pooled; None where no run has predictions of it."""
        values: dict[int, dict[str, float]] = {}
        drawn: dict[int, dict[str, Floats]] = {}
        for seed, folds in self.runs.get(name, {}).items():
            own = [fold.where(fold.columns["view"] == view) for fold in folds]
            if own and all(len(fold) for fold in own):
                scored = [_scores(fold, scope) for fold in own]
                resampled = [self._drawn(fold, metrics, scope) for fold in own]
                values[seed] = {metric: float(np.mean([fold[metric] for fold in scored])) for metric in metrics}
                drawn[seed] = {metric: np.mean([fold[metric] for fold in resampled], axis=0) for metric in metrics}
        if not values:
            return None
        return RowEvidence(
            tuple(values),
            {metric: np.array([own[metric] for own in values.values()]) for metric in metrics},
            {metric: np.stack([own[metric] for own in drawn.values()]) for metric in metrics},
        )

    def _drawn(self, predictions: Predictions, metrics: Sequence[str], scope: str) -> dict[str, Floats]:
        of_models = [rounds for _, rounds in models(predictions)]
        if scope == "pooled":
            rounds = [joined(own) for own in zip(*of_models)]
            return mean_resamples(rounds, self.weights, metrics)
        return sites_together([mean_resamples(rounds, self.weights, metrics) for rounds in of_models])


def _scores(predictions: Predictions, scope: str) -> dict[str, float]:
    """The metrics in this scope; nan where one is undefined."""
    found = next(scored for scored in scores_of(predictions) if scored.scope == scope).summary["metrics"]
    return {name: float("nan") if value is None else value for name, value in found.items()}


def _of_split(predictions: Predictions, split: str) -> Predictions:
    return predictions.where(predictions.columns["split"] == split)
