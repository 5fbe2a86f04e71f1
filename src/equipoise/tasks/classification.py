"""Classification: one label for each image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise import metrics
from equipoise.cells import compact
from equipoise.data.federation import Split
from equipoise.metrics import METRICS, Metric
from equipoise.probabilities import calibration_bins, per_class_auc
from equipoise.tasks.small_counts import merged_bins, merged_cells
from equipoise.tasks.task import Counts, Task, number

CALIBRATION_BINS = 15
#: sums of numbers between 0 and 1 may be off by so much, by rounding
SLACK = 1e-3
#: the number that a probability in a logarithm does not go below
SMALLEST = 1e-38


class Classification(Task):
    """One label per image."""

    name: ClassVar[str] = "classification"
    lacks: ClassVar[Mapping[str, str]] = {"masks": "classification does not have"}
    metrics: ClassVar[tuple[Metric, ...]] = METRICS
    discloses: ClassVar[str] = "confusion matrix, calibration bins, loss and per-class AUC of local images"
    gives: ClassVar[str] = "probabilities (n, classes)"
    nets: ClassVar[tuple[str, str]] = "small-cnn", "resnet18"

    def targets(self, split: Split, positions: Tensor) -> Tensor:
        return torch.from_numpy(split.labels)[positions]

    def augmented(
        self, transform: Callable[..., Any], images: Tensor, targets: Tensor, randomness: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        return transform(images, randomness), targets

    def images(self, class_counts: Tensor, pixels: int) -> int:
        return int(class_counts.sum())

    def agreement(self, confusion: Tensor) -> float:
        """Macro F1 over the classes present."""
        return metrics.Tally({"confusion": confusion.cpu().numpy()}).mean_f1

    def observe(self, logits: Tensor, targets: Tensor) -> Counts:
        return {"logits": logits.float(), "target": targets}

    def count(self, seen: Mapping[str, Tensor], split: Split, single: bool = False) -> Counts:
        """The counts of `measure`; with each image's `scores` where asked for."""
        logits = torch.nan_to_num(seen["logits"])  # a diverged model is measured like any other
        counts = self.measure(logits, seen["target"])
        if not single:
            return counts
        single_ones = {"scores": logits.softmax(1), "predictions": logits.argmax(1), "labels": seen["target"]}
        return counts | {name: values.cpu() for name, values in single_ones.items()}

    def measure(self, logits: Tensor, targets: Tensor) -> Counts:
        """Confusion, calibration bins, loss, and the AUC of each class at this site (-1: undefined)."""
        loss = F.cross_entropy(logits, targets, reduction="sum")
        probabilities = logits.softmax(1).cpu().double().numpy()
        labels = targets.cpu().numpy()
        counts = {"confusion": self.confusion(logits, targets).cpu(), **_counted(labels, probabilities)}
        return counts | {"loss": loss.double().cpu().reshape(1)}

    def counts_of(self, labels: np.ndarray, predictions: np.ndarray, probabilities: np.ndarray) -> Counts:
        """The counts of `measure`, from predicted classes (n,) and probabilities (n, C) that were kept."""
        values = probabilities.astype(np.float64)
        confusion = metrics.confusion_matrix(labels, predictions, self.num_classes)
        of_label = np.take_along_axis(values, labels[:, None], 1)
        loss = -np.log(np.maximum(of_label, SMALLEST)).sum()
        counts = {"confusion": torch.from_numpy(confusion), **_counted(labels, values)}
        return counts | {"loss": torch.tensor([loss], dtype=torch.float64)}

    @cached_property
    def template(self) -> Counts:
        return self.measure(torch.zeros(1, self.num_classes), torch.zeros(1, dtype=torch.int64))

    def problem(self, counts: Counts, described: Sequence[int], least: int = 0) -> str | None:
        return counts_problem(counts, described, least)

    def told(self, split: Split, least: int) -> np.ndarray:
        """The images of classes with at least so many images."""
        return split.class_counts(self.num_classes)[split.labels] >= least

    def merged(self, counts: Counts, least: int) -> Counts:
        """Small cells join others of their row, small bins their neighbours; AUC and loss are of enough images."""
        return counts | {
            "confusion": torch.from_numpy(merged_cells(counts["confusion"].numpy(), least)),
            "calibration": torch.from_numpy(merged_bins(counts["calibration"].numpy(), least)),
        }

    def merge(self, counts: Sequence[Counts]) -> Counts:
        """Sums; AUC does not add up, so a pool has one only where the counts hold raw `scores`."""
        areas = torch.full((self.num_classes,), -1.0, dtype=torch.float64)
        if all("scores" in own for own in counts):
            labels = np.concatenate([own["labels"].numpy() for own in counts])
            probabilities = np.concatenate([own["scores"].numpy() for own in counts])
            areas = torch.from_numpy(np.nan_to_num(per_class_auc(labels, probabilities), nan=-1.0))
        sums = {key: torch.stack([own[key] for own in counts]).sum(0) for key in ("confusion", "calibration", "loss")}
        return sums | {"auc": areas}

    def summary(self, counts: Counts) -> dict[str, Any]:
        confusion = counts["confusion"].numpy()
        numbers = metrics.measure({name: np.asarray(value) for name, value in counts.items()}, self.also)
        recall = numbers.pop("recall")
        return {
            "metrics": {name: number(value) for name, value in numbers.items()},
            "recall": [number(value) for value in recall],
            "confusion": compact(confusion),
            "n": int(confusion.sum()),
        }


def counts_problem(counts: Counts, described: Sequence[int], least: int = 0) -> str | None:
    """What cannot be true of the counts of a model on images, of which `described` says the number in each class.

    Where small counts join others (`privacy.least`), bins and diagonal need not agree.
    """
    rows = counts["confusion"].sum(1).tolist()
    for label, (found, told) in enumerate(zip(rows, described)):
        if found != told:
            return f"its confusion matrix has {found} images of class {label + 1}, but it described {told}"
    return _calibration_problem(counts, sum(described), least > 1) or _curve_problem(counts["auc"], described)


def _calibration_problem(counts: Counts, images: int, merged: bool) -> str | None:
    """Bins of confidence hold each image once, and agree with the diagonal of the confusion matrix."""
    bins = counts["calibration"]
    if not bool(bins.isfinite().all()):  # a model that diverged
        return None
    number, confidence, correct = bins
    right = int(correct.sum()) if merged else int(counts["confusion"].diagonal().sum())
    whole = bool((bins >= 0).all()) and bool((number == number.round()).all())
    if not whole or int(number.sum()) != images or int(correct.sum()) != right:
        return f"its calibration bins do not hold {images} images, {right} of them predicted rightly"
    if bool((correct > number).any()) or bool((confidence > number + SLACK).any()):
        return "its calibration bins hold more than their images"
    loss = float(counts["loss"])
    return f"its loss is {loss:.3g}" if loss < 0 else None


def _curve_problem(areas: Tensor, described: Sequence[int]) -> str | None:
    """An area under a curve lies between 0 and 1, and is defined where a class has images and so have others."""
    images = sum(described)
    for area, own in zip(areas.tolist(), described):
        if area != -1 and not (0 <= area <= 1 + SLACK and 0 < own < images):
            return f"the area under the curve of a class of {own} among {images} images is {area:.3g}"
    return None


def _counted(labels: np.ndarray, probabilities: np.ndarray) -> Counts:
    """Calibration bins, and the AUC of each class."""
    bins = calibration_bins(labels, probabilities, CALIBRATION_BINS)
    return {
        "calibration": torch.from_numpy(np.stack([np.asarray(b, dtype=np.float64) for b in bins])),
        "auc": torch.from_numpy(np.nan_to_num(per_class_auc(labels, probabilities), nan=-1.0)),
    }


TASK = Classification
