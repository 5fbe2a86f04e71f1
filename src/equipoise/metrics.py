"""Metrics for imbalanced classes, in numpy, over the classes present in the labels; tests of significance.

Sites send confusion matrices and calibration bins, whose counts add up. So every metric but AUC follows for one site or
for all, and no image's score leaves its site.

`METRICS` is the one list of metrics. The config, logs, tables, figures and studies take theirs from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.arguments import whole_numbers
from equipoise.core.errors import UserError
from equipoise.core.outside import short_name
from equipoise.core.plugins import entry_names, find, is_plugin
from equipoise.core.suggestions import unknown

Floats = NDArray[np.float64]
#: the specificity at which sensitivity is reported
SPECIFICITY = 0.9
#: asks `measure` for every metric, also those that few runs measure
EVERY = "every"
#: scores whose curves are drawn together; more would leave the processor's cache
CURVE_CELLS = 1 << 11


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
        value: float = _over_present(np.mean, self.f1)
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


@dataclass(frozen=True)
class Metric:
    """A number that tells how good a model is: how it is computed, and where it is shown.

    >>> rarest = Metric("rarest", "recall of the last class", lambda tally: float(tally.recall[-1]))
    >>> rarest.of(Tally({"confusion": [[8, 2], [3, 1]]}))
    0.25
    """

    name: str
    title: str
    of: Callable[[Any], float]
    """The metric of a `Tally` (or a `MaskTally`), nan where it is undefined."""
    short: str = ""
    """The heading in a narrow terminal; empty: the title."""
    meaning: str = ""
    """The metric in one sentence, for readers of reports."""
    needs: str = "confusion"
    """The counts that it is computed of."""
    higher_is_better: bool = True
    chooses: bool = False
    """Whether `evaluation.metric` may choose the reported round by it."""
    in_tables: bool = True
    """Whether it is a column of reports and studies."""
    study_place: int = 99
    """Where it stands among the columns of a study that names none; reports have the order of `METRICS`."""
    in_curves: bool = False
    """Whether the report of a run draws its learning curves."""
    opens: bool = False
    """Whether it is one of the few numbers that open the report of a run."""
    share: bool = True
    """Whether it is a share, which tables show in per cent."""
    always: bool = True
    """Whether every run measures it; else only runs that choose rounds by it do."""
    guessing: float | None = None
    """The score of guessing, where there is one that no data changes."""
    has_retrogress: bool = True
    """Whether a study draws the drop of this score after communication; else that of the first metric."""

    @property
    def heading(self) -> str:
        """The title for a narrow terminal."""
        return self.short or self.title

    @property
    def scale(self) -> int:
        """What a value is multiplied by to be shown: shares are shown in per cent."""
        return 100 if self.in_tables and self.share else 1


#: every metric; the first one is the default
METRICS: tuple[Metric, ...] = (
    Metric(
        "balanced_accuracy",
        "Balanced accuracy",
        lambda tally: _over_present(np.mean, tally.recall),
        short="bal.\nacc.",
        chooses=True,
        study_place=2,
        in_curves=True,
        opens=True,
        meaning="Recall of each class, averaged over the classes. Every class counts the same, rare or common.",
    ),
    Metric(
        "macro_f1",
        "Macro F1",
        lambda tally: tally.mean_f1,
        short="macro\nF1",
        chooses=True,
        study_place=1,
        in_curves=True,
        opens=True,
        meaning="F1 of each class, averaged over the classes. F1 joins recall and precision.",
    ),
    Metric(
        "accuracy",
        "Accuracy",
        lambda tally: tally.accuracy,
        short="acc.",
        chooses=True,
        study_place=4,
        meaning="Share of images that are classified right. Common classes decide it.",
    ),
    Metric(
        "balanced_auc",
        "Balanced AUC",
        lambda tally: _over_present(np.mean, tally.areas),
        short="bal.\nAUC",
        needs="auc",
        guessing=0.5,
        chooses=True,
        study_place=3,
        has_retrogress=False,
        meaning="Area under the ROC curve of each class against the others, averaged. 50 % is guessing.",
    ),
    Metric(
        "worst_class_recall",
        "Worst class recall",
        lambda tally: _over_present(np.min, tally.recall),
        short="worst\nclass",
        study_place=5,
        opens=True,
        meaning="Recall of the class that is found least often.",
    ),
    Metric(
        "fedbm_score",
        "Sum of scores (FedBM)",
        lambda tally: (
            2 * tally.accuracy  # FedBM's authors add micro recall as well, which is accuracy
            + sum(_over_present(np.mean, values) for values in (tally.precision, tally.f1, tally.areas))
        ),
        needs="auc",
        chooses=True,
        in_tables=False,
        always=False,
        has_retrogress=False,
    ),
    Metric(
        "macro_precision",
        "Macro precision",
        lambda tally: _over_present(np.mean, tally.precision),
        in_tables=False,
        always=False,
    ),
    Metric(
        "macro_specificity",
        "Macro specificity",
        lambda tally: _over_present(np.mean, tally.specificity),
        in_tables=False,
        always=False,
    ),
    Metric(
        "sensitivity_at_90",
        f"Sensitivity at {SPECIFICITY:.0%} specificity",
        lambda tally: _over_present(np.mean, tally.counts["sensitivity"]),
        needs="sensitivity",
        in_tables=False,
        always=False,
        has_retrogress=False,
    ),
    Metric(
        "ece",
        "ECE",
        lambda tally: tally.calibration_error,
        needs="calibration",
        higher_is_better=False,
        study_place=6,
        has_retrogress=False,
        meaning="Expected calibration error: how far confidence is from accuracy. Lower is better.",
    ),
    Metric(
        "loss",
        "Loss",
        lambda tally: tally.loss,
        needs="loss",
        higher_is_better=False,
        in_tables=False,
        in_curves=True,
    ),
)


def metric_of(name: str) -> Metric:
    """A metric by the name that `evaluation.metric` has, of this list or from outside.

    One from outside is a `Metric`, or a function of a `Tally`. Its scores are called as `short_name` says.
    """
    known = {metric.name: metric for metric in METRICS}
    if name in known:
        return known[name]
    if not is_plugin("metric", name):
        raise unknown("metric", name, [*known, *entry_names("metric")])
    found = find("metric", name)
    if not isinstance(found, Metric):
        if not callable(found):
            raise UserError(
                f"{name} is {type(found).__name__} and no equipoise.Metric or function of a Tally; name one"
            )
        title = short_name(name).replace("-", " ").capitalize()
        found = Metric(name, title, found, chooses=True)
    if not found.higher_is_better:
        raise UserError(f"of the metric {name} lower is better, but the best round has the highest; give its negative")
    return replace(found, name=short_name(name))


def measure(counts: Mapping[str, ArrayLike], also: str = "") -> dict[str, Any]:
    """Every metric that these counts allow, and the list `recall` of the classes; nan where one is undefined.

    A class without samples is in no mean, also where it was predicted. `also` names a metric that few runs measure, or
    is EVERY.
    """
    tally = Tally(counts)
    wanted = [metric for metric in METRICS if metric.always or also in (metric.name, EVERY)]
    if is_plugin("metric", also):
        wanted.append(metric_of(also))
    numbers = {metric.name: metric.of(tally) for metric in wanted if metric.needs in counts}
    return {**numbers, "recall": tally.recall.tolist()}


def from_confusion(confusion: ArrayLike) -> dict[str, Any]:
    """Balanced accuracy, macro F1, accuracy, worst class recall and the list of recalls, from counts (C, C)."""
    return measure({"confusion": confusion})


def confusion_matrix(labels: ArrayLike, predictions: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Counts (C, C) of samples by true class (row) and predicted class (column)."""
    true = _classes("labels", labels, num_classes)
    predicted = _classes("predictions", predictions, num_classes)
    if len(true) != len(predicted):
        raise UserError(f"there are {len(true)} labels but {len(predicted)} predictions")
    cells = np.bincount(true * num_classes + predicted, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


def accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Share of samples that are predicted right."""
    return float(from_confusion(_confusion(labels, predictions))["accuracy"])


def balanced_accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Mean recall over the classes present in the labels."""
    return float(from_confusion(_confusion(labels, predictions))["balanced_accuracy"])


def macro_f1(labels: ArrayLike, predictions: ArrayLike, num_classes: int) -> float:
    """Mean F1 over the classes present in the labels."""
    return float(from_confusion(confusion_matrix(labels, predictions, num_classes))["macro_f1"])


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
    return float(_over_present(np.mean, per_class_auc(labels, probabilities)))


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
    return float(ratio(gaps.sum(), np.asarray(count).sum()))


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of equal means of paired results (over seeds, say); 1 where they do not differ."""
    from scipy.stats import ttest_1samp

    return _paired(first, second, lambda gaps: ttest_1samp(gaps, 0.0).pvalue)


def wilcoxon_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of the signed-rank test on paired results; 1 where they do not differ."""
    from scipy.stats import wilcoxon

    return _paired(first, second, lambda gaps: wilcoxon(gaps).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for several comparisons (Holm, 1979), in the order given; nan stays, uncounted."""
    corrected = np.array(p_values, dtype=np.float64)
    order = np.argsort(corrected)[: np.count_nonzero(~np.isnan(corrected))]
    steps = corrected[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return [float(p) for p in corrected]


def _classes(argument: str, values: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Class numbers (n,), refused where one is outside 0 .. num_classes - 1."""
    classes = whole_numbers(argument, values)
    outside = classes[(classes < 0) | (classes >= num_classes)]
    if outside.size:
        raise UserError(f"{argument} holds class {outside[0]}, but classes run from 0 to {num_classes - 1}")
    return classes


def _confusion(labels: ArrayLike, predictions: ArrayLike) -> NDArray[np.int64]:
    """The confusion matrix of the classes that occur, under any numbering."""
    true, predicted = whole_numbers("labels", labels), whole_numbers("predictions", predictions)
    names, places = np.unique(np.concatenate([true, predicted]), return_inverse=True)
    return confusion_matrix(places[: len(true)], places[len(true) :], max(len(names), 1))


def _scored(labels: ArrayLike, probabilities: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """Probabilities (n, C) and labels (n,)."""
    scores = np.asarray(probabilities, dtype=np.float64)
    if scores.ndim != 2:
        raise UserError(f"probabilities have the shape {scores.shape}, expected (samples, classes)")
    true = _classes("labels", labels, scores.shape[1])
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


def ratio(part: ArrayLike, whole: ArrayLike) -> Floats:
    """Part / whole, nan where the whole is 0."""
    whole = np.asarray(whole, dtype=np.float64)
    shares: Floats = np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)
    return shares


def _over_present(reduce: Callable[[Floats], Any], values: Floats) -> Any:
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


def _paired(first: Sequence[float], second: Sequence[float], p_value: Callable[[Floats], float]) -> float:
    """The p-value of the paired differences: nan for fewer than two pairs, 1 where every difference is 0."""
    if len(first) != len(second):
        raise UserError(f"a paired test needs as many results of both kinds, not {len(first)} and {len(second)}")
    gaps = np.subtract(first, second, dtype=np.float64)
    if len(gaps) < 2:
        return float("nan")
    return float(p_value(gaps)) if gaps.any() else 1.0
