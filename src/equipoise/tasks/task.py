"""What the engine asks of a task; each task is one file beside this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from equipoise.data.federation import Split
from equipoise.metrics import Metric

#: what was counted of some images, by name
Counts = dict[str, Tensor]


class Task:
    """Defines the targets, how predictions are counted, and the metrics from these counts.

    Counts are tensors that add up over sites, so that a site sends no scores of single patients.

    Args:
        classes: their names, in order
        also: a metric to measure besides those that every run does
    """

    #: as `Federation.task` names it
    name: ClassVar[str]
    #: whether a target is a mask, with a class for each pixel, and logits are (B, C, H, W)
    dense: ClassVar[bool] = False
    #: words of methods and components that do not hold with this task, and why in a few words
    lacks: ClassVar[Mapping[str, str]] = {}
    #: the first one chooses rounds by default
    metrics: ClassVar[tuple[Metric, ...]]
    #: what sites tell of the images that they measure a model on
    discloses: ClassVar[str]
    #: what a model gives for n images, in words
    gives: ClassVar[str]
    #: the nets where a config names none: for small images, and for larger ones
    nets: ClassVar[tuple[str, str]]

    def __init__(self, classes: Sequence[str], also: str = ""):
        self.classes = tuple(classes)
        self.also = also

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    # ---- targets -----------------------------------------------------------------------------------

    def targets(self, split: Split, positions: Tensor) -> Tensor:
        """The targets of the images at positions (b,) of a split, on the host."""
        raise NotImplementedError

    def augmented(
        self, transform: Callable[..., Any], images: Tensor, targets: Tensor, randomness: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Images ready for a net, and the targets that belong to them."""
        raise NotImplementedError

    def images(self, class_counts: Tensor, pixels: int) -> int:
        """How many images of so many pixels the numbers (C,) of each class are of."""
        raise NotImplementedError

    # ---- counts ------------------------------------------------------------------------------------

    def confusion(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(C, C) counts, rows true, columns predicted; stays on the device."""
        size = self.num_classes
        cells = (targets.long() * size + logits.argmax(1)).flatten()
        # As `bincount`, which would wait for the device to know how long its result is.
        return cells.new_zeros(size * size).scatter_add_(0, cells, torch.ones_like(cells)).reshape(size, size)

    def agreement(self, confusion: Tensor) -> float:
        """One number that tells from counts (C, C) how well a model predicts, by which methods compare models."""
        raise NotImplementedError

    def observe(self, logits: Tensor, targets: Tensor) -> Counts:
        """What is kept of one batch until all of a part is seen, a row for each image; stays on the device."""
        raise NotImplementedError

    def count(self, seen: Mapping[str, Tensor], split: Split, single: bool = False) -> Counts:
        """Everything that `summary` needs of a whole part, as tensors on the host.

        Args:
            seen: what `observe` gave, in the order of the split
            single: also what is known of single images or patients, which never leaves its machine
        """
        raise NotImplementedError

    @cached_property
    def template(self) -> Counts:
        """Counts of the kinds and shapes that sites measure."""
        raise NotImplementedError

    def told(self, split: Split, least: int) -> np.ndarray:
        """Which images of a part, bool (n,), a site may tell of, where it tells of no fewer than `least`."""
        return np.full(len(split), len(split) >= least)

    def merged(self, counts: Counts, least: int) -> Counts:
        """Counts of these images without a number from 1 to `least` - 1 of them."""
        raise NotImplementedError

    def problem(self, counts: Counts, described: Sequence[int], least: int = 0) -> str | None:
        """What cannot be true of counts, beside what a site said of its part: its numbers of each class.

        Args:
            least: `privacy.least` of the run
        """
        raise NotImplementedError

    def merge(self, counts: Sequence[Counts]) -> Counts:
        """The counts of several sites taken together."""
        raise NotImplementedError

    def summary(self, counts: Counts) -> dict[str, Any]:
        """Metrics of counts: fractions, and None where one is undefined."""
        raise NotImplementedError


def number(value: float) -> float | None:
    """A plain number; None where it is undefined."""
    return float(value) if np.isfinite(value) else None
