"""Segmentation: one class for each pixel. Class 0 is the background, all others are structures.

Sites send pixel counts, and sums over patients of what was measured in each patient's volume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.cells import compact
from equipoise.data.federation import Split
from equipoise.mask_metrics import CASE, MASK_METRICS, MaskTally, dice_of, measure_masks, volume_scores
from equipoise.metrics import Metric
from equipoise.tasks.task import Counts, Task, number

#: sums of fractions may be off by so much, by rounding
SLACK = 1e-3


class Segmentation(Task):
    """A mask for each image."""

    name: ClassVar[str] = "segmentation"
    dense: ClassVar[bool] = True
    lacks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("image labels", "pooled features"), "segmentation does not have"
    )
    metrics: ClassVar[tuple[Metric, ...]] = MASK_METRICS
    discloses: ClassVar[str] = (
        "confusion matrix of pixels, loss, numbers of images and patients, and sums over patients of Dice, IoU and "
        "surface distances"
    )
    gives: ClassVar[str] = "probabilities (n, classes, height, width): the chances of each pixel"
    nets: ClassVar[tuple[str, str]] = "small-unet", "deeplab-resnet18"

    def targets(self, split: Split, positions: Tensor) -> Tensor:
        return split.masks(positions)

    def augmented(
        self, transform: Callable[..., Any], images: Tensor, targets: Tensor, randomness: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        return transform(images, randomness, targets)

    def images(self, class_counts: Tensor, pixels: int) -> int:
        return round(float(class_counts.double().sum()) / pixels)

    def agreement(self, confusion: Tensor) -> float:
        """Mean Dice of the structures, over all pixels together; 0 where there is none."""
        return float(np.nan_to_num(dice_of(confusion.cpu().numpy())))

    def observe(self, logits: Tensor, targets: Tensor) -> Counts:
        """The predicted and the true mask, a byte for each pixel, and the loss of each image."""
        losses = F.cross_entropy(logits.float(), targets.long(), reduction="none").flatten(1).sum(1)
        predicted = torch.nan_to_num(logits).argmax(1).to(torch.uint8)  # a diverged model is measured like any other
        return {"predicted": predicted, "target": targets.to(torch.uint8), "loss": losses}

    def count(self, seen: Mapping[str, Tensor], split: Split, single: bool = False) -> Counts:
        """Counts of pixels and of volumes; with each volume's `cases` (V, 4, C) where asked for."""
        predicted, truth = (seen[name].cpu().numpy() for name in ("predicted", "target"))
        cells = np.bincount(
            (truth.astype(np.int64) * self.num_classes + predicted).ravel(), minlength=self.num_classes**2
        )
        cases = np.stack([volume_scores(truth[v], predicted[v], self.num_classes) for v in volumes_of(split)])
        sums = np.nan_to_num(cases).sum(0)
        counts = {
            "confusion": torch.from_numpy(cells.reshape(self.num_classes, self.num_classes)),
            "volumes": torch.from_numpy((~np.isnan(cases[:, 0])).sum(0)),
            **{name: torch.from_numpy(row.copy()) for name, row in zip(CASE, sums)},
            "loss": seen["loss"].double().sum().cpu().reshape(1),
            "images": torch.tensor([len(truth)]),
        }
        return counts | ({"cases": torch.from_numpy(cases)} if single else {})

    @cached_property
    def template(self) -> Counts:
        size = self.num_classes
        whole = {"confusion": torch.zeros(size, size), "volumes": torch.zeros(size), "images": torch.zeros(1)}
        sums = {name: torch.zeros(size, dtype=torch.float64) for name in CASE}
        counts = {name: tensor.to(torch.int64) for name, tensor in whole.items()} | sums
        counts["loss"] = torch.zeros(1, dtype=torch.float64)
        return {name: counts[name] for name in ("confusion", "volumes", *CASE, "loss", "images")}

    def merged(self, counts: Counts, least: int) -> Counts:
        """Structures of fewer patients count as absent; pixels come from enough images."""
        few = (counts["volumes"] > 0) & (counts["volumes"] < least)
        return counts | {name: counts[name].masked_fill(few, 0) for name in ("volumes", *CASE)}

    def problem(self, counts: Counts, described: Sequence[int], least: int = 0) -> str | None:
        """Impossible sums over volumes. Rows of the confusion matrix have to match the site's description.

        Where images are resized before they are measured, their pixels are other ones, and only sums can be checked.
        """
        confusion, volumes = counts["confusion"], counts["volumes"]
        images, pixels = int(counts["images"]), int(confusion.sum())
        if pixels == sum(described) and confusion.sum(1).tolist() != list(described):
            return "its confusion matrix has other numbers of pixels of each class than it described"
        if not images or pixels % images or bool((volumes > images).any()):
            return f"it counts {pixels} pixels and up to {int(volumes.max())} volumes in {images} images"
        sums = torch.stack([counts[name] for name in CASE])
        if not bool(sums.isfinite().all()) or bool((sums < 0).any()):
            return "its sums over volumes are no distances and no overlaps"
        dice, iou = counts["dice"], counts["iou"]
        if bool((dice > volumes + SLACK).any()) or bool((iou > dice + SLACK).any()):
            return "its sums of Dice and IoU are larger than its numbers of volumes allow"
        loss = float(counts["loss"])
        return f"its loss is {loss:.3g}" if loss < 0 else None

    def merge(self, counts: Sequence[Counts]) -> Counts:
        return {name: torch.stack([own[name] for own in counts]).sum(0) for name in self.template}

    def summary(self, counts: Counts) -> dict[str, Any]:
        """As of classification, for pixels; and by structure (`by_class`) the means over volumes."""
        plain = {name: counts[name].numpy() for name in self.template}
        tally = MaskTally(plain)
        return {
            "metrics": {name: number(value) for name, value in measure_masks(plain).items()},
            "recall": [number(value) for value in tally.recall],
            "by_class": {name: [number(value) for value in tally.of(name)] for name in CASE},
            "confusion": compact(counts["confusion"]),
            "n": int(counts["images"]),
        }


def volumes_of(split: Split) -> list[np.ndarray]:
    """The positions of the slices of each patient of a split; patients in the order in which they first come."""
    _, first, inverse = np.unique(split.groups(), return_index=True, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(inverse))[:-1])
    return [rows[place] for place in np.argsort(first, kind="stable")]


TASK = Segmentation
