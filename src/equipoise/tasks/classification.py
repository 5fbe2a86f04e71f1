"""A task decides what targets are, how predictions are counted, and which numbers come of the counts.

Counts are tensors that add up over sites, so that a site sends no scores of single patients. Classification is the
only task there is; ARCHITECTURE.md says what another, such as segmentation, would need besides a `Task`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise import metrics

CALIBRATION_BINS = 15

#: what was counted of some images, by name
Counts = dict[str, Tensor]


class Task:
    """What the engine needs to know of a task."""

    classes: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def confusion(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(C, C) counts, rows true, columns predicted; stays on the device."""
        raise NotImplementedError

    def measure(self, logits: Tensor, targets: Tensor) -> Counts:
        """Everything that `summary` needs, as tensors on the host."""
        raise NotImplementedError

    def merge(self, counts: Sequence[Counts]) -> Counts:
        """The counts of several sites taken together."""
        raise NotImplementedError

    def summary(self, counts: Counts) -> dict[str, Any]:
        """Metrics of counts: fractions, and None where one is undefined."""
        raise NotImplementedError


class Classification(Task):
    """One label per image.

    Args:
        also: a metric to measure besides those that every run does
    """

    def __init__(self, classes: Sequence[str], also: str = ""):
        self.classes = tuple(classes)
        self.also = also

    def confusion(self, logits: Tensor, targets: Tensor) -> Tensor:
        size = self.num_classes
        cells = targets * size + logits.argmax(1)
        # As `bincount`, which would wait for the device to know how long its result is.
        return cells.new_zeros(size * size).scatter_add_(0, cells, torch.ones_like(cells)).reshape(size, size)

    def measure(self, logits: Tensor, targets: Tensor) -> Counts:
        """Confusion, calibration bins, loss, and the AUC of each class at this site (-1: undefined)."""
        loss = F.cross_entropy(logits, targets, reduction="sum")
        probabilities = logits.softmax(1).cpu().double().numpy()
        labels = targets.cpu().numpy()
        bins = metrics.calibration_bins(labels, probabilities, CALIBRATION_BINS)
        return {
            "confusion": self.confusion(logits, targets).cpu(),
            "calibration": torch.from_numpy(np.stack([np.asarray(b, dtype=np.float64) for b in bins])),
            "auc": torch.from_numpy(np.nan_to_num(metrics.per_class_auc(labels, probabilities), nan=-1.0)),
            "loss": loss.double().cpu().reshape(1),
        }

    def merge(self, counts: Sequence[Counts]) -> Counts:
        """Sums; AUC does not add up, so a pool has one only where the counts hold raw `scores`."""
        return {key: torch.stack([c[key] for c in counts]).sum(0) for key in ("confusion", "calibration", "loss")} | {
            "auc": torch.full((self.num_classes,), -1.0, dtype=torch.float64)
        }

    def summary(self, counts: Counts) -> dict[str, Any]:
        confusion = counts["confusion"].numpy()
        numbers = metrics.measure({name: value.numpy() for name, value in counts.items()}, self.also)
        recall = numbers.pop("recall")
        return {
            "metrics": {name: _number(value) for name, value in numbers.items()},
            "recall": [_number(value) for value in recall],
            "confusion": confusion.tolist(),
            "n": int(confusion.sum()),
        }


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
