"""Intervals by the bootstrap (Efron and Tibshirani, 1993): groups of images, seeds, sites are drawn with replacement.

A group is what was sampled as one: the images of a lesion or of a patient. Each resample is a row of weights, and
counts of images are one matrix product of weights and counts of groups. So a thousand resamples take milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.streams import stream
from equipoise.metrics import SPECIFICITY
from equipoise.tallies import Floats, Tally, ratio
from equipoise.thresholds import SMALLEST, curve_points

#: resamples of an interval
DRAWS = 1000
#: how sure an interval is
CONFIDENCE = 0.95
#: fewer sites than this are no sample of sites
FEWEST_SITES = 10
#: weights of images that are held at a time
CELLS = 1 << 22
#: bins of confidence, as runs have them
BINS = 15


@dataclass(frozen=True)
class Interval:
    """An estimate, and the bounds that hold the true value with CONFIDENCE; nan where they are unknown."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """How much higher one method's score is than another's on the same images.

    Args:
        probability: the share of resamples in which the first one's score is higher, ties counted by half
        effect: the difference in standard deviations of the seeds' differences (Cohen's d of pairs); nan for one seed
    """

    difference: Interval
    probability: float
    effect: float


def drawn_weights(items: int, generator: np.random.Generator, draws: int = DRAWS) -> NDArray[np.float32]:
    """How often each of some items is drawn in each resample: (draws, items); each row adds up to `items`."""
    return generator.multinomial(items, np.full(items, 1 / items), draws).astype(np.float32)


def with_sample(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights (1 + B, G) with those of the sample itself in front, where each group counts once."""
    return np.concatenate([np.ones_like(weights[:1]), weights])


class Resampled(Tally):
    """The counts of many resamples of the same predictions: a `Tally` whose shares are (B, C).

    A class that a resample lacks keeps the sample's value there: otherwise a mean would be of other classes.

    Args:
        labels: (n,) class of each image
        probabilities: (n, C)
        predictions: (n,) predicted class of each image
        groups: (n,) number of each image's group
        weights: (1 + B, G) how often each group is drawn; the first row is of the sample itself
    """

    def __init__(
        self,
        labels: NDArray[np.int64],
        probabilities: Floats,
        predictions: NDArray[np.int64],
        groups: NDArray[np.int64],
        weights: NDArray[np.float32],
    ):
        self.labels, self.probabilities = labels, np.asarray(probabilities, dtype=np.float64)
        self.groups, self.weights = groups, weights
        classes = range(self.probabilities.shape[1])
        right = labels == predictions
        self.true, self.predicted, self.found = (
            self._summed(np.stack([(of == one) & among for one in classes], axis=1))
            for of, among in ((labels, True), (predictions, True), (labels, right))
        )

    def _summed(self, values: NDArray) -> Floats:
        """The weighted sums (B, K) of values (n, K) of images."""
        of_groups = np.zeros((self.weights.shape[1], values.shape[1]), dtype=np.float32)
        np.add.at(of_groups, self.groups, values.astype(np.float32))
        return (self.weights @ of_groups).astype(np.float64)

    @cached_property
    def recall(self) -> Floats:
        """(B, C) recall of each class."""
        return _filled(ratio(self.found, self.true))

    @cached_property
    def f1(self) -> Floats:
        """(B, C) F1 of each class."""
        return _filled(ratio(2 * self.found, np.where(self.true > 0, self.true + self.predicted, 0)))

    @cached_property
    def precision(self) -> Floats:
        """(B, C) precision of each class."""
        return _filled(np.where(self.true > 0, self.found / np.maximum(self.predicted, 1), np.nan))

    @cached_property
    def specificity(self) -> Floats:
        """(B, C) specificity of each class."""
        others = self.true.sum(1, keepdims=True) - self.true
        return _filled(np.where(self.true > 0, 1 - ratio(self.predicted - self.found, others), np.nan))

    @property
    def accuracy(self) -> Floats:  # type: ignore[override]
        """(B,) accuracy."""
        return ratio(self.found.sum(1), self.true.sum(1))[1:]

    @property
    def areas(self) -> Floats:
        """(B, C) area under the ROC curve of each class."""
        return self._curves[0]

    @property
    def counts(self) -> Mapping[str, Floats]:  # type: ignore[override]
        """`sensitivity` (B, C) at SPECIFICITY."""
        return {"sensitivity": self._curves[1]}

    @cached_property
    def calibration_error(self) -> Floats:  # type: ignore[override]
        """(B,) expected calibration error."""
        confidence = self.probabilities.max(1)
        right = self.probabilities.argmax(1) == self.labels
        bins = np.searchsorted(np.arange(1, BINS) / BINS, confidence)
        gaps = (confidence - right)[:, None] * (bins[:, None] == np.arange(BINS))
        return ratio(np.abs(self._summed(gaps)).sum(1), self.true.sum(1))[1:]

    @cached_property
    def loss(self) -> Floats:  # type: ignore[override]
        """(B,) mean cross entropy."""
        of_label = np.take_along_axis(self.probabilities, self.labels[:, None], 1)
        return ratio(self._summed(-np.log(np.maximum(of_label, SMALLEST)))[:, 0], self.true.sum(1))[1:]

    @cached_property
    def _curves(self) -> tuple[Floats, Floats]:
        """Area under the ROC curve, and sensitivity at SPECIFICITY, of each class: (B, C) each."""
        areas = np.full(self.true.shape, np.nan)
        sensitivity = areas.copy()
        present = np.flatnonzero(np.bincount(self.labels, minlength=self.true.shape[1]))
        if len(present) < 2 or not np.isfinite(self.probabilities[:, present]).all():
            return areas[1:], sensitivity[1:]
        rows = max(1, CELLS // len(self.labels))
        for start in range(0, len(self.weights), rows):
            some = slice(start, start + rows)
            weights = np.ascontiguousarray(self.weights[some].T)
            for one in present:
                found, false = curve_points(self.labels == one, self.probabilities[:, one], self.groups, weights)
                areas[some, one], sensitivity[some, one] = area_and_sensitivity(found, false)
        return _filled(areas), _filled(sensitivity)


def _filled(values: Floats) -> Floats:
    """The values (B, C) of resamples, those that are unknown taken from the sample in front."""
    return np.where(np.isnan(values[1:]), values[0], values[1:])


def area_and_sensitivity(found: NDArray[np.float32], false: NDArray[np.float32]) -> tuple[Floats, Floats]:
    """Area under ROC curves, and their sensitivity at SPECIFICITY, (B,) each; nan for a curve without both kinds.

    Args:
        found, false: (T, B) positives and negatives with a score at least that of each threshold, from the highest
    """
    positives, negatives = found[-1].astype(np.float64), false[-1].astype(np.float64)
    first = false[0].astype(np.float64) * found[0]
    below = np.einsum("tb,tb->b", np.diff(false, axis=0), found[1:] + found[:-1], dtype=np.float64, casting="same_kind")
    area = ratio((first + below) / 2, positives * negatives)
    allowed = (false <= (1 - SPECIFICITY) * negatives + 1e-3).sum(0)
    best = np.where(allowed > 0, np.take_along_axis(found, np.maximum(allowed - 1, 0)[None], 0)[0], 0.0)
    return area, np.where(np.isnan(area), np.nan, ratio(best, positives))


def exact_counts(labels: ArrayLike, probabilities: Floats) -> dict[str, Floats]:
    """The counts of single predictions that sums over sites do not hold: `sensitivity` (C,)."""
    labels = np.asarray(labels)
    one = np.ones((2, len(labels)), dtype=np.float32)
    predictions = probabilities.argmax(1)
    found = Resampled(labels, probabilities, predictions, np.arange(len(labels)), one)
    return {"sensitivity": found.counts["sensitivity"][0]}


# ---- from resamples to intervals ----------------------------------------------------------------------------------


def interval(value: float, resamples: Floats, confidence: float = CONFIDENCE) -> Interval:
    """The bias-corrected percentile interval of an estimate, of its resamples (B,); nan are left out."""
    from scipy.special import ndtr, ndtri

    known = resamples[~np.isnan(resamples)]
    if np.isnan(value) or not known.size:
        return Interval(float(value), float("nan"), float("nan"))
    below = ((known < value).mean() + (known <= value).mean()) / 2
    shift = ndtri(np.clip(below, 1 / (len(known) + 1), len(known) / (len(known) + 1)))
    tail = ndtri((1 - confidence) / 2)
    low, high = np.quantile(known, [ndtr(2 * shift + tail), ndtr(2 * shift - tail)])
    return Interval(float(value), float(min(low, value)), float(max(high, value)))


def over_seeds(values: Floats, generator: np.random.Generator) -> Floats:
    """The mean over seeds of each resample, with seeds drawn too: values (S, B) to (B,).

    Deviations of drawn seeds are widened by S / (S - 1), for a sample of few deviates too little from its own mean.
    """
    return _drawn_mean(values, generator)


def over_sites(values: Floats, generator: np.random.Generator) -> Floats:
    """The mean over the sites that have a score, (K, B) to (B,); sites are drawn, too, from FEWEST_SITES on."""
    if len(values) < FEWEST_SITES:
        return _known_mean(values, np.ones_like(values))
    weights = drawn_weights(len(values), generator, values.shape[1]).T.astype(np.float64)
    return _known_mean(values, weights)


def _known_mean(values: Floats, weights: Floats) -> Floats:
    known = ~np.isnan(values)
    return ratio((np.where(known, values, 0.0) * weights).sum(0), (known * weights).sum(0))


def _drawn_mean(values: Floats, generator: np.random.Generator) -> Floats:
    """The mean over the first axis where its members are drawn with replacement."""
    count, draws = values.shape
    if count < 2:
        return values.mean(0)
    drawn = drawn_weights(count, generator, draws).T.astype(np.float64)
    widened = np.sqrt(count / (count - 1))
    return values.mean(0) + widened * ((drawn - 1) * values).sum(0) / count


def paired(first: Floats, second: Floats, values: Floats, others: Floats) -> PairedDifference:
    """The difference of two methods' scores.

    Args:
        first, second: (B,) resamples of both, over the same images and seeds
        values, others: (S,) scores of both, by seed
    """
    gaps, resampled = np.subtract(values, others), first - second
    known = resampled[~np.isnan(resampled)]
    higher = (known > 0).mean() + (known == 0).mean() / 2 if known.size else float("nan")
    deviation = float(np.std(gaps, ddof=1)) if len(gaps) > 1 else 0.0
    effect = float(gaps.mean()) / deviation if deviation > 0 else float("nan")
    return PairedDifference(interval(float(gaps.mean()), resampled), float(higher), effect)


def numbered(names: NDArray) -> tuple[NDArray[np.int64], int]:
    """Names (n,) as numbers from 0 on, and how many different ones there are."""
    different, numbers = np.unique(names, return_inverse=True)
    return numbers.astype(np.int64), len(different)


def generator_of(name: str, seed: int = 0) -> np.random.Generator:
    """The generator of this name: equal names draw equal resamples, so that methods are compared on the same ones."""
    return np.random.default_rng(stream(seed, "bootstrap", name))
