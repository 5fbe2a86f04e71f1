"""Counts of predictions that add up over sites, and the shares of classes that metrics are computed of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.errors import UserError

Floats = NDArray[np.float64]


class Tally:
    """The counts of some images by name, with the shares that several metrics need.

    Args:
        counts: `confusion` (C, C); a task adds `calibration` (3, bins), `auc` (C,) of each class (-1: no curve) and the
            summed `loss`; single predictions also give `sensitivity` (C,) at SPECIFICITY (nan: no curve)

    >>> tally = Tally({"confusion": [[8, 2], [3, 1]]})
    >>> tally.recall.tolist()
    [0.8, 0.25]
    """

    def __init__(self, counts: Mapping[str, ArrayLike]):
        self.counts = {name: np.asarray(value, dtype=np.float64) for name, value in counts.items()}
        self.confusion = self.counts["confusion"]
        if self.confusion.ndim != 2 or self.confusion.shape[0] != self.confusion.shape[1]:
            shape = self.confusion.shape
            raise UserError(f"a confusion matrix has a row and a column for each class, not the shape {shape}")

    @cached_property
    def recall(self) -> Floats:
        """(C,) share of each class's samples that are found; nan for a class without samples."""
        return ratio(self.confusion.diagonal(), self.confusion.sum(1))

    @cached_property
    def f1(self) -> Floats:
        """(C,) F1 of each class; nan for a class without samples, also where it was predicted."""
        true, predicted = self.confusion.sum(1), self.confusion.sum(0)
        return ratio(2 * self.confusion.diagonal(), np.where(true > 0, true + predicted, 0))

    @property
    def mean_f1(self) -> float:
        """Mean F1 over the classes present; nan without samples."""
        value: float = over_present(np.mean, self.f1)
        return value

    @cached_property
    def precision(self) -> Floats:
        """(C,) share of right ones among predictions of a class, 0 without any; nan for a class without samples."""
        true, predicted = self.confusion.sum(1), self.confusion.sum(0)
        found = self.confusion.diagonal() / np.maximum(predicted, 1)
        return np.where(true > 0, found, np.nan)

    @cached_property
    def specificity(self) -> Floats:
        """(C,) share of the other classes' samples that are not taken for a class; nan for a class without samples."""
        true, predicted, every = self.confusion.sum(1), self.confusion.sum(0), self.confusion.sum()
        false_alarms = predicted - self.confusion.diagonal()
        return np.where(true > 0, 1 - ratio(false_alarms, every - true), np.nan)

    @property
    def accuracy(self) -> float:
        """Share of samples that are predicted right."""
        return float(ratio(self.confusion.trace(), self.confusion.sum()))

    @property
    def areas(self) -> Floats:
        """(C,) area under the curve of each class; nan where there is no curve."""
        areas = self.counts["auc"]
        return np.where(areas >= 0, areas, np.nan)

    @property
    def calibration_error(self) -> float:
        """The expected calibration error."""
        return ece_from_bins(*self.counts["calibration"])

    @property
    def loss(self) -> float:
        """Mean loss of a sample; 0 without samples."""
        return float(self.counts["loss"].sum() / max(self.confusion.sum(), 1))


def ece_from_bins(count: ArrayLike, confidence_sum: ArrayLike, correct_sum: ArrayLike) -> float:
    """Expected calibration error: |accuracy - confidence| over bins, by samples (Guo et al., 2017)."""
    gaps = np.abs(np.asarray(confidence_sum, dtype=np.float64) - np.asarray(correct_sum, dtype=np.float64))
    return float(ratio(gaps.sum(), np.asarray(count).sum()))


def ratio(part: ArrayLike, whole: ArrayLike) -> Floats:
    """Part / whole, nan where the whole is 0."""
    whole = np.asarray(whole, dtype=np.float64)
    shares: Floats = np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)
    return shares


def over_present(reduce: Callable[[Floats], Any], values: Floats) -> Any:
    """Reduce the values (C,) of the classes present, those that are not nan; nan where there is none.

    Values (B, C) of resamples give (B,).
    """
    if values.ndim > 1:
        return MANY[reduce](values)
    kept = values[~np.isnan(values)]
    return float(reduce(kept)) if kept.size else float("nan")


def _means(values: Floats) -> Floats:
    """The mean over the known values of each row of (B, C); nan where none is known."""
    known = ~np.isnan(values)
    return ratio(np.where(known, values, 0.0).sum(-1), known.sum(-1))


#: how the values of many resamples are reduced
MANY: dict[Callable[[Floats], Any], Callable[[Floats], Floats]] = {
    np.mean: _means,
    np.min: lambda values: np.fmin.reduce(values, axis=-1),
}
