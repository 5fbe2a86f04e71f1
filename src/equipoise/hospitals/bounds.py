"""Bounds on what sites report: by what they described of their data, and by what most of the others report.

The server cannot catch every lie of a site. It can compare a site's numbers with its earlier ones and with those of
other sites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor


def absurd(values: Mapping[str, float], limits: Mapping[str, float], least: float = 0.0) -> dict[str, str]:
    """The sites whose value is more than a multiple of the median of the others', and by how much, in words.

    One of two sites cannot put the other in the wrong: where two differ so much, both are out.

    Args:
        limits: how large a multiple may be, by site
        least: medians below this count as this
    """
    found = {}
    for site, own in values.items():
        others = [value for other, value in values.items() if other != site]
        usual = max(median(others), least) if others else 0.0
        if usual > 0 and own > limits[site] * usual:
            found[site] = f"{own / usual:.3g} times as large as usual at the others"
    if found and len(values) == 2:
        return dict.fromkeys(values, "very different from the other site's, and there is no third site to compare with")
    return found


def chance(classes: int) -> float:
    """The loss of an image whose class is guessed."""
    return math.log(max(classes, 2))


def share_of(examples: Mapping[str, int], site: str, sites: Sequence[str]) -> float:
    """How many times as many training images a site has as the median of the others; 1 at least."""
    others = [examples.get(other, 0) for other in sites if other != site]
    usual = median(others) if others else 0
    return max(1.0, examples.get(site, 0) / usual) if usual else 1.0


def size_of(value: Any) -> float | None:
    """How large a reported value is: a number's size, or a tensor's length; None for what has no size."""
    if isinstance(value, Mapping):
        sizes = [size for entry in value.values() if (size := size_of(entry)) is not None]
        return math.hypot(*sizes) if sizes else None
    if isinstance(value, Tensor):
        return float(torch.linalg.vector_norm(value.double())) if value.is_floating_point() else None
    if isinstance(value, int | float):
        return float(abs(value))
    return None
