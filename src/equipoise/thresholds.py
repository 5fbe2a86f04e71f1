"""Curves of predictions: ROC, precision against recall, reliability, net benefit; and temperature scaling.

Curves are one class against the others. Functions take labels (n,) and probabilities (n, C), and give arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
#: thresholds at which net benefit is shown
THRESHOLDS = np.arange(1, 100) / 100
#: the temperatures that scaling may choose from
COLDEST, HOTTEST = 0.05, 20.0
#: the number that probabilities do not go below
SMALLEST = 1e-38


class Curve(NamedTuple):
    """Points of a curve: x and y (T,), and the threshold (T,) at which each is reached."""

    x: Floats
    y: Floats
    threshold: Floats


def curve_points(
    positive: NDArray[np.bool_], scores: Floats, groups: NDArray[np.int64], weights: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Weighted numbers of positives and of negatives with a score at least that of each threshold: (T, B) each.

    Args:
        positive, scores, groups: (n,) of each image
        weights: (G, B) of each group, whole numbers
    """
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    last = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(falling) - 1)
    of_images = weights[groups[order]]
    found = np.cumsum(of_images * positive[order, None], axis=0)[last]
    return found, np.cumsum(of_images, axis=0, out=of_images)[last] - found


def _points(positive: NDArray[np.bool_], scores: Floats) -> tuple[Floats, Floats, Floats]:
    """Positives and negatives found at each threshold, and the thresholds from the highest: (T,) each."""
    once = np.ones((len(scores), 1), dtype=np.float32)
    found, false = curve_points(positive, scores, np.arange(len(scores)), once)
    return found[:, 0].astype(np.float64), false[:, 0].astype(np.float64), np.unique(scores)[::-1].astype(np.float64)


def roc(positive: NDArray[np.bool_], scores: Floats) -> Curve:
    """The ROC curve: share of false alarms (x) against sensitivity (y). It begins at (0, 0)."""
    found, false, thresholds = _points(positive, scores)
    return Curve(np.append(0.0, false / false[-1]), np.append(0.0, found / found[-1]), np.append(np.inf, thresholds))


def precision_recall(positive: NDArray[np.bool_], scores: Floats) -> Curve:
    """Recall (x) against precision (y)."""
    found, false, thresholds = _points(positive, scores)
    return Curve(found / found[-1], found / (found + false), thresholds)


def net_benefit(positive: NDArray[np.bool_], scores: Floats, thresholds: Floats = THRESHOLDS) -> Curve:
    """Decision curve: threshold (x) against net benefit (y), true alarms less false ones at the threshold's odds.

    Vickers and Elkin (2006). Per image; 0 is the benefit of treating no patient.
    """
    alarms = scores[:, None] >= thresholds
    true, false = (alarms & positive[:, None]).mean(0), (alarms & ~positive[:, None]).mean(0)
    return Curve(thresholds, true - false * thresholds / (1 - thresholds), thresholds)


def treat_all(positive: NDArray[np.bool_], thresholds: Floats = THRESHOLDS) -> Floats:
    """The net benefit of treating everybody, (T,)."""
    return positive.mean() - (~positive).mean() * thresholds / (1 - thresholds)


def reliability(labels: NDArray[np.int64], probabilities: Floats, bins: int = 15) -> tuple[Floats, Floats, Floats]:
    """Mean confidence, accuracy and number of images of each bin of confidence that holds any: (T,) each."""
    from equipoise.probabilities import calibration_bins

    count, confidence, right = calibration_bins(labels, probabilities, bins)
    held = count > 0
    return confidence[held] / count[held], right[held] / count[held], count[held].astype(np.float64)


def temperature(labels: NDArray[np.int64], probabilities: Floats) -> float:
    """The temperature that gives validation images the least cross entropy (Guo et al., 2017); 1: none is better."""
    from scipy.optimize import minimize_scalar

    logits = np.log(np.maximum(np.asarray(probabilities, dtype=np.float64), SMALLEST))

    def loss(log_temperature: float) -> float:
        scaled = logits / np.exp(log_temperature)
        return float(np.mean(np.logaddexp.reduce(scaled, axis=1) - scaled[np.arange(len(labels)), labels]))

    found = minimize_scalar(loss, bounds=(np.log(COLDEST), np.log(HOTTEST)), method="bounded")
    return float(np.exp(found.x)) if found.fun < loss(0.0) else 1.0


def scaled(probabilities: Floats, by: float) -> Floats:
    """Probabilities (n, C) after division of the logits by a temperature."""
    logits = np.log(np.maximum(np.asarray(probabilities, dtype=np.float64), SMALLEST)) / by
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    return exponents / exponents.sum(1, keepdims=True)
