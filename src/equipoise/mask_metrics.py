"""Metrics of masks: overlap and distance of surfaces, for each structure in each patient's volume.

A volume is all slices of one patient. Distances are in pixels, within slices: how far slices lie apart is not known.

The rule for empty masks. A structure that neither truth nor prediction has in a volume says nothing: the volume does
not count for it. If only one of them has a structure, Dice and IoU are 0, and the distances are the diagonal of a
slice. So is the distance of a surface in a slice where the other has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.errors import UserError
from equipoise.metrics import LOSS, Metric
from equipoise.tallies import Floats, Tally, over_present, ratio

#: what is known of each structure in each volume, in this order
CASE = ("dice", "iou", "hd95", "asd")
#: neighbours of a pixel within its slice; a structure's surface are its pixels with a neighbour outside
_CROSS = np.array([[[0, 1, 0], [1, 1, 1], [0, 1, 0]]], dtype=bool)
#: how far apart slices count to lie, so that no distance leads from one to another
_FAR = 1e9


def overlap(truth: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> tuple[float, float]:
    """Dice and IoU of two masks of one shape; nan where both are empty."""
    both = int(np.count_nonzero(truth & predicted))
    sizes = int(np.count_nonzero(truth)) + int(np.count_nonzero(predicted))
    if not sizes:
        return float("nan"), float("nan")
    return 2 * both / sizes, both / (sizes - both)


def surface_distances(truth: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> tuple[float, float]:
    """95 % Hausdorff distance and average surface distance of two masks (slices, H, W); nan where both are empty.

    The first is the larger of both directions' 95th percentiles, the second the mean over both surfaces.
    """
    from scipy.ndimage import binary_erosion, distance_transform_edt

    if truth.shape != predicted.shape or truth.ndim != 3:
        raise UserError(f"masks (slices, H, W) of one shape are compared, not {truth.shape} and {predicted.shape}")
    diagonal = float(np.hypot(*truth.shape[1:]))
    if not truth.any() and not predicted.any():
        return float("nan"), float("nan")
    if not truth.any() or not predicted.any():
        return diagonal, diagonal
    truth, predicted = _cropped(truth, predicted)
    surfaces = [mask & ~binary_erosion(mask, _CROSS) for mask in (truth, predicted)]
    fields = [distance_transform_edt(~surface, sampling=(_FAR, 1, 1)) for surface in surfaces]
    ways = [np.minimum(fields[1][surfaces[0]], diagonal), np.minimum(fields[0][surfaces[1]], diagonal)]
    return max(float(np.percentile(way, 95)) for way in ways), float(np.concatenate(ways).mean())


def _cropped(*masks: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """The box that holds all masks, with a margin of a pixel, where surfaces would otherwise touch its edge."""
    either = np.logical_or.reduce(masks)
    box = []
    for axis in range(either.ndim):
        others = tuple(other for other in range(either.ndim) if other != axis)
        places = np.flatnonzero(either.any(axis=others))
        box.append(slice(int(places[0]), int(places[-1]) + 1))
    margin = ((0, 0), (1, 1), (1, 1))
    return [np.pad(mask[tuple(box)], margin) for mask in masks]


def volume_scores(truth: NDArray[np.uint8], predicted: NDArray[np.uint8], num_classes: int) -> Floats:
    """(4, C): Dice, IoU, HD95 and ASD of each structure in one volume (slices, H, W); nan where it is not to be seen.

    The background, class 0, is no structure: its column is nan.
    """
    found = np.full((len(CASE), num_classes), np.nan)
    for structure in range(1, num_classes):
        masks = truth == structure, predicted == structure
        found[:, structure] = *overlap(*masks), *surface_distances(*masks)
    return found


class MaskTally(Tally):
    """The counts of some volumes by name, with what several metrics need.

    Args:
        counts: `confusion` (C, C) of pixels; `volumes` (C,) in which a structure is to be seen, and the sums over
            these of `dice`, `iou`, `hd95` and `asd`; the summed `loss`
    """

    def of(self, name: str) -> Floats:
        """(C,) the mean over volumes for each structure; nan for one that is nowhere, and for the background."""
        return ratio(self.counts[name], self.counts["volumes"])


def dice_of(confusion: ArrayLike) -> float:
    """Mean over structures of the Dice of counts (C, C) of pixels, the background apart; nan where there is none."""
    cells = np.asarray(confusion, dtype=np.float64)
    found: float = over_present(np.mean, ratio(2 * cells.diagonal(), cells.sum(0) + cells.sum(1))[1:])
    return found


def _volumes(name: str, title: str, of: str, reduce: Any = np.mean, **more: Any) -> Metric:
    """A metric of the means over volumes of each structure."""
    return Metric(name, title, lambda tally: over_present(reduce, tally.of(of)[1:]), needs="volumes", **more)


def _distance(name: str, title: str, study_place: int) -> Metric:
    more: Any = {"higher_is_better": False, "share": False, "has_retrogress": False}
    return _volumes(name, f"{title} (pixels)", name, short=f"{title}\n(px)", study_place=study_place, **more)


#: every metric of masks; the first one is the default
MASK_METRICS: tuple[Metric, ...] = (
    _volumes("dice", "Dice", "dice", chooses=True, study_place=1, in_curves=True, opens=True),
    _volumes("iou", "IoU", "iou", chooses=True, study_place=2, opens=True),
    _distance("hd95", "HD95", 3),
    _distance("asd", "ASD", 4),
    _volumes("worst_dice", "Worst structure's Dice", "dice", np.min, short="worst\nDice", study_place=5),
    Metric(
        "pixel_dice",
        "Dice of all pixels together",
        lambda tally: dice_of(tally.confusion),
        short="pixel\nDice",
        chooses=True,
        in_tables=False,
    ),
    LOSS,
)


def measure_masks(counts: Mapping[str, ArrayLike]) -> dict[str, Any]:
    """Every metric of these counts; nan where one is undefined."""
    tally = MaskTally(counts)
    return {metric.name: metric.of(tally) for metric in MASK_METRICS}
