"""Counts without small numbers: where one would be of few images, it joins a neighbour, and the sums stay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def merged_cells(confusion: NDArray[np.int64], least: int) -> NDArray[np.int64]:
    """A confusion matrix (C, C) whose cells are 0 or at least `least`, with the same sum in each row.

    The small cells of a row join the largest of them where they make up enough together, else the row's largest cell.
    A row itself has to be empty or of at least so many images.
    """
    found = confusion.copy()
    for row in found:
        small = (row > 0) & (row < least)
        joined = row[small].sum()
        if not joined:
            continue
        chosen = np.where(small, row, 0).argmax() if joined >= least else row.argmax()
        row[small] = 0
        row[chosen] += joined
    return found


def merged_bins(bins: NDArray[np.float64], least: int) -> NDArray[np.float64]:
    """Calibration bins (3, B) of images, confidences and right predictions, none of them about few images.

    Neighbours are merged until each group has 0 or at least `least` images, right ones and wrong ones. A group stands
    in the bin of its mean confidence. Where one group is left whose right or wrong ones are few, they count as none.
    """
    groups: list[NDArray[np.float64]] = []
    rest = np.zeros(3)
    for column in bins.T:
        rest = rest + column
        if rest[0] and _enough(rest, least):
            groups.append(rest)
            rest = np.zeros(3)
    while rest[0] and not _enough(rest, least) and groups:
        rest = rest + groups.pop()
    if rest[0]:
        groups.append(rest)
    found = np.zeros_like(bins)
    edges = np.arange(1, bins.shape[1]) / bins.shape[1]
    for group in groups:
        images, confidence, right = group
        if 0 < right < least:
            group[2] = 0
        elif 0 < images - right < least:
            group[2] = images
        found[:, np.searchsorted(edges, confidence / images)] += group
    return found


def _enough(group: NDArray[np.float64], least: int) -> bool:
    images, _, right = group
    return all(number == 0 or number >= least for number in (images, right, images - right))
