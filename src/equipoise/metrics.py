"""Metrics for imbalanced classes, in numpy, over the classes present in the labels.

Sites send confusion matrices and calibration bins, whose counts add up. So every metric but AUC follows for one site or
for all, and no image's score leaves its site.

`METRICS` is the one list of metrics. The config, logs, tables, figures and studies take theirs from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.arguments import whole_numbers
from equipoise.core.errors import UserError
from equipoise.core.outside import short_name
from equipoise.core.plugins import entry_names, find, is_plugin
from equipoise.core.suggestions import unknown
from equipoise.probabilities import balanced_auc, classes_in
from equipoise.tallies import Tally, over_present

__all__ = ["METRICS", "Metric", "Tally", "accuracy", "balanced_accuracy", "balanced_auc", "macro_f1"]

#: the specificity at which sensitivity is reported
SPECIFICITY = 0.9
#: asks `measure` for every metric, also those that few runs measure
EVERY = "every"


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
    most: float = 1.0
    """The highest score that there can be of a built-in metric, where intervals end; they begin at 0."""
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


LOSS = Metric(
    "loss",
    "Loss",
    lambda tally: tally.loss,
    needs="loss",
    higher_is_better=False,
    in_tables=False,
    in_curves=True,
    most=float("inf"),
)

#: every metric; the first one is the default
METRICS: tuple[Metric, ...] = (
    Metric(
        "balanced_accuracy",
        "Balanced accuracy",
        lambda tally: over_present(np.mean, tally.recall),
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
        lambda tally: over_present(np.mean, tally.areas),
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
        lambda tally: over_present(np.min, tally.recall),
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
            + sum(over_present(np.mean, values) for values in (tally.precision, tally.f1, tally.areas))
        ),
        needs="auc",
        chooses=True,
        in_tables=False,
        always=False,
        has_retrogress=False,
        most=5.0,
    ),
    Metric(
        "macro_precision",
        "Macro precision",
        lambda tally: over_present(np.mean, tally.precision),
        in_tables=False,
        always=False,
    ),
    Metric(
        "macro_specificity",
        "Macro specificity",
        lambda tally: over_present(np.mean, tally.specificity),
        in_tables=False,
        always=False,
    ),
    Metric(
        "sensitivity_at_90",
        f"Sensitivity at {SPECIFICITY:.0%} specificity",
        lambda tally: over_present(np.mean, tally.counts["sensitivity"]),
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
    LOSS,
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
    true = classes_in("labels", labels, num_classes)
    predicted = classes_in("predictions", predictions, num_classes)
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


def _confusion(labels: ArrayLike, predictions: ArrayLike) -> NDArray[np.int64]:
    """The confusion matrix of the classes that occur, under any numbering."""
    true, predicted = whole_numbers("labels", labels), whole_numbers("predictions", predictions)
    names, places = np.unique(np.concatenate([true, predicted]), return_inverse=True)
    return confusion_matrix(places[: len(true)], places[len(true) :], max(len(names), 1))
