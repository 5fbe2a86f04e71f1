"""Metrics for imbalanced classes, in numpy, over the classes present in the labels; tests of significance.

Sites send confusion matrices and calibration bins: counts that add up, so that every metric but the area
under the curve can be had for one site or for all of them without a score leaving its site.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from sklearn.metrics import roc_auc_score

from equipoise.core.arguments import whole_numbers
from equipoise.core.errors import UserError


def confusion_matrix(labels: ArrayLike, predictions: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Counts (C, C) of samples by true class (row) and predicted class (column)."""
    true = _classes("labels", labels, num_classes)
    predicted = _classes("predictions", predictions, num_classes)
    if len(true) != len(predicted):
        raise UserError(f"there are {len(true)} labels but {len(predicted)} predictions")
    cells = np.bincount(true * num_classes + predicted, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


def from_confusion(confusion: ArrayLike) -> dict[str, Any]:
    """Balanced accuracy, macro F1, accuracy, worst class recall and the list of recalls, from counts (C, C).

    A class without samples is in no mean, also where it was predicted; with no sample at all every number is
    nan.
    """
    counts = np.asarray(confusion, dtype=np.float64)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        raise UserError(f"a confusion matrix has a row and a column for each class, not the shape {counts.shape}")
    found, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    recall, f1 = _ratio(found, true), _ratio(2 * found, np.where(true > 0, true + predicted, 0))
    return {
        "balanced_accuracy": _over_present(np.mean, recall),
        "macro_f1": _over_present(np.mean, f1),
        "accuracy": float(_ratio(found.sum(), true.sum())),
        "worst_class_recall": _over_present(np.min, recall),
        "recall": recall.tolist(),
    }


def accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Share of samples that are predicted right."""
    return from_confusion(_confusion(labels, predictions))["accuracy"]


def balanced_accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Mean recall over the classes present in the labels."""
    return from_confusion(_confusion(labels, predictions))["balanced_accuracy"]


def macro_f1(labels: ArrayLike, predictions: ArrayLike, num_classes: int) -> float:
    """Mean F1 over the classes present in the labels."""
    return from_confusion(confusion_matrix(labels, predictions, num_classes))["macro_f1"]


def per_class_auc(labels: ArrayLike, probabilities: ArrayLike) -> NDArray[np.float64]:
    """(C,) exact one-against-the-rest area under the ROC curve of each class; nan where there is no curve.

    Labels (n,), probabilities (n, C). A class that is absent, the only one present, or scored with nan by a
    model that diverged, has no curve.
    """
    scores, true = _scored(labels, probabilities)
    present = np.unique(true)
    areas = np.full(scores.shape[1], np.nan)
    for label in present if len(present) > 1 else ():
        if np.isfinite(scores[:, label]).all():
            areas[label] = roc_auc_score(true == label, scores[:, label])
    return areas


def balanced_auc(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean of `per_class_auc` over the classes present; nan with fewer than two of them."""
    return _over_present(np.mean, per_class_auc(labels, probabilities))


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


def ece_from_bins(count: ArrayLike, confidence_sum: ArrayLike, correct_sum: ArrayLike) -> float:
    """Expected calibration error: |accuracy - confidence| over bins, by samples (Guo et al., 2017)."""
    gaps = np.abs(np.asarray(confidence_sum, dtype=np.float64) - np.asarray(correct_sum, dtype=np.float64))
    return float(_ratio(gaps.sum(), np.asarray(count).sum()))


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of equal means of paired results (over seeds, say); 1 where they do not differ."""
    return _paired(first, second, lambda gaps: stats.ttest_1samp(gaps, 0.0).pvalue)


def wilcoxon_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of the signed-rank test on paired results; 1 where they do not differ."""
    return _paired(first, second, lambda gaps: stats.wilcoxon(gaps).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for several comparisons (Holm, 1979), in the order given; nan stays, uncounted."""
    corrected = np.array(p_values, dtype=np.float64)
    order = np.argsort(corrected)[: np.count_nonzero(~np.isnan(corrected))]
    steps = corrected[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected.tolist()


def _classes(argument: str, values: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Class numbers (n,), refused where one is outside 0 .. num_classes - 1."""
    classes = whole_numbers(argument, values)
    outside = classes[(classes < 0) | (classes >= num_classes)]
    if outside.size:
        raise UserError(f"{argument} holds class {outside[0]}, but classes run from 0 to {num_classes - 1}")
    return classes


def _confusion(labels: ArrayLike, predictions: ArrayLike) -> NDArray[np.int64]:
    """The confusion matrix of the classes that occur, whatever their numbers."""
    true, predicted = whole_numbers("labels", labels), whole_numbers("predictions", predictions)
    names, places = np.unique(np.concatenate([true, predicted]), return_inverse=True)
    return confusion_matrix(places[: len(true)], places[len(true) :], max(len(names), 1))


def _scored(labels: ArrayLike, probabilities: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities (n, C) and labels (n,)."""
    scores = np.asarray(probabilities, dtype=np.float64)
    if scores.ndim != 2:
        raise UserError(f"probabilities have the shape {scores.shape}, expected (samples, classes)")
    true = _classes("labels", labels, scores.shape[1])
    if len(true) != len(scores):
        raise UserError(f"there are {len(true)} labels but {len(scores)} rows of probabilities")
    return scores, true


def _ratio(part: ArrayLike, whole: ArrayLike) -> NDArray[np.float64]:
    """Part / whole, nan where the whole is 0."""
    whole = np.asarray(whole, dtype=np.float64)
    return np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)


def _over_present(reduce: Callable[[NDArray[np.float64]], Any], values: NDArray[np.float64]) -> float:
    """Reduce the values of the classes present, those that are not nan; nan where there is none."""
    kept = values[~np.isnan(values)]
    return float(reduce(kept)) if kept.size else float("nan")


def _paired(first: Sequence[float], second: Sequence[float], p_value: Callable[[NDArray[np.float64]], float]) -> float:
    """The p-value of the paired differences: nan for fewer than two pairs, 1 where every difference is 0."""
    if len(first) != len(second):
        raise UserError(f"a paired test needs as many results of both kinds, not {len(first)} and {len(second)}")
    gaps = np.subtract(first, second, dtype=np.float64)
    if len(gaps) < 2:
        return float("nan")
    return float(p_value(gaps)) if gaps.any() else 1.0
