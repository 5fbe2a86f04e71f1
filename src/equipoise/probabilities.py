"""Numbers that follow from the probabilities of images: areas under ROC curves, and bins of calibration."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.arguments import whole_numbers
from equipoise.core.errors import UserError
from equipoise.tallies import Floats, over_present

#: scores whose curves are drawn together; more would leave the processor's cache
CURVE_CELLS = 1 << 11


def per_class_auc(labels: ArrayLike, probabilities: ArrayLike) -> Floats:
    """(C,) exact one-against-the-rest area under the ROC curve of each class; nan where there is no curve.

    Labels (n,), probabilities (n, C). A class that is absent, the only one present, or scored with nan by a
    model that diverged, has no curve.
    """
    scores, true = _scored(labels, probabilities)
    areas = np.full(scores.shape[1], np.nan)
    present = np.flatnonzero(np.bincount(true, minlength=len(areas)))
    if len(present) > 1:
        drawn = present[np.isfinite(scores[:, present]).all(axis=0)]
        pieces = min(drawn.size * len(true) // CURVE_CELLS + 1, drawn.size)
        for some in np.array_split(drawn, pieces) if pieces else ():
            areas[some] = _areas_under_curves(np.equal(true, some[:, None]), scores.T[some])
    return areas


def balanced_auc(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean of `per_class_auc` over the classes present; nan with fewer than two of them."""
    return float(over_present(np.mean, per_class_auc(labels, probabilities)))


def calibration_bins(
    labels: ArrayLike, probabilities: ArrayLike, bins: int = 15
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Samples, summed confidence and correct predictions per bin of confidence, (bins,) each.

    Bins of several sites add up. Labels (n,), probabilities (n, C); bin b holds the samples with b / bins <
    confidence <= (b + 1) / bins.
    """
    scores, true = _scored(labels, probabilities)
    confidence, correct = scores.max(1), scores.argmax(1) == true
    index = np.searchsorted(np.arange(1, bins) / bins, confidence)
    count, confidence_sum, correct_sum = (
        np.bincount(index, weights=values, minlength=bins) for values in (None, confidence, correct)
    )
    return count, confidence_sum, correct_sum


def classes_in(argument: str, values: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Class numbers (n,), refused where one is outside 0 .. num_classes - 1."""
    classes = whole_numbers(argument, values)
    outside = classes[(classes < 0) | (classes >= num_classes)]
    if outside.size:
        raise UserError(f"{argument} holds class {outside[0]}, but classes run from 0 to {num_classes - 1}")
    return classes


def _scored(labels: ArrayLike, probabilities: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """Probabilities (n, C) and labels (n,)."""
    scores = np.asarray(probabilities, dtype=np.float64)
    if scores.ndim != 2:
        raise UserError(f"probabilities have the shape {scores.shape}, expected (samples, classes)")
    true = classes_in("labels", labels, scores.shape[1])
    if len(true) != len(scores):
        raise UserError(f"there are {len(true)} labels but {len(scores)} rows of probabilities")
    return scores, true


def _areas_under_curves(positive: NDArray[np.bool_], scores: Floats) -> list[float]:
    """The area under each of R ROC curves by trapezoids; positive (R, n), scores (R, n), both kinds in every row.

    Points between others on a line are left out, as in scikit-learn, so that the last bit is the same as there.
    """
    order = np.negative(scores, order="C").argsort(1)
    falling = np.take_along_axis(scores, order, 1)
    last = np.ones_like(positive)  # of each run of equal scores
    last[:, :-1] = falling[:, 1:] != falling[:, :-1]
    ends = np.flatnonzero(last)
    samples = scores.size // len(scores)
    curve = ends // samples
    found = np.cumsum(np.take_along_axis(positive, order, 1), axis=1, dtype=np.float64).ravel()[ends]
    false = 1 + ends - curve * samples - found
    first = np.searchsorted(curve, np.arange(len(scores) + 1))
    corners = np.ones(len(curve), dtype=bool)
    corners[1:-1] = (np.diff(false, 2) != 0) | (np.diff(found, 2) != 0)
    corners[first[:-1]] = corners[first[1:] - 1] = True
    false, found, curve = false[corners], found[corners], curve[corners]
    first = np.searchsorted(curve, np.arange(len(scores) + 1))
    x, y = (counts / counts[first[1:] - 1][curve] for counts in (false, found))
    x_before, y_before = (np.append(0.0, counts[:-1]) for counts in (x, y))
    x_before[first[:-1]] = y_before[first[:-1]] = 0.0
    pieces = (x - x_before) * (y + y_before) / 2.0
    return [float(pieces[start:end].sum()) for start, end in pairwise(first)]
