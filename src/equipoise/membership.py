"""Membership inference: how well models tell which images they were trained on.

Carlini et al., Membership Inference Attacks From First Principles, S&P 2022 (LiRA): train shadow models with and
without an image, and compare the attacked model with both kinds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.errors import UserError

Floats = NDArray[np.float64]
#: shadow models with and without each image, from which on each image gets its own variance
OWN_VARIANCE = 16
#: share of images that were not trained on and may be taken for members
FALSE_POSITIVES = 0.01
_LEAST = 1e-12


class Attack(NamedTuple):
    """How well an attack does, each with a 95 % interval over images."""

    members: int
    others: int
    auc: tuple[float, float, float]
    found: tuple[float, float, float]
    """Share of members that are found at `FALSE_POSITIVES`."""


def confidence(probabilities: ArrayLike, labels: ArrayLike) -> Floats:
    """log p_y - log(1 - p_y) of probabilities (n, C) and labels (n,): about normal over models."""
    rows = np.asarray(probabilities, dtype=np.float64)
    own = np.take_along_axis(rows, np.asarray(labels, dtype=np.int64)[:, None], axis=1)[:, 0]
    others = rows.sum(1) - own
    return np.log(np.maximum(own, _LEAST)) - np.log(np.maximum(others, _LEAST))


def likelihood_ratios(target: Floats, shadows: Floats, inside: NDArray[np.bool_]) -> Floats:
    """How much likelier it is that images (n,) were trained on than that they were not.

    Args:
        target: (n,) confidences of the attacked model
        shadows: (k, n) those of the shadow models
        inside: (k, n) whether the shadow model was trained on the image

    An image that all shadow models have, or none, is judged by the mean over all images for the side that lacks.
    """
    if not inside.any() or inside.all():
        raise UserError("every shadow model was trained on the same images; train more of them")
    sides = [_normal(shadows, inside), _normal(shadows, ~inside)]
    (mean_in, spread_in), (mean_out, spread_out) = sides
    return _log_density(target, mean_in, spread_in) - _log_density(target, mean_out, spread_out)


def _normal(shadows: Floats, chosen: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Mean and deviation (n,) of the chosen shadow models' confidences for each image."""
    number = chosen.sum(0)
    mean = np.where(chosen, shadows, 0.0).sum(0) / np.maximum(number, 1)
    mean = np.where(number > 0, mean, shadows[chosen].mean())
    squares = np.where(chosen, (shadows - mean) ** 2, 0.0).sum(0)
    freedom = np.maximum(number - 1, 0)
    common = squares[number > 0].sum() / max(freedom.sum(), 1)
    own = squares / np.maximum(freedom, 1)
    variance = np.where(number >= OWN_VARIANCE, own, common)
    return mean, np.sqrt(np.maximum(variance, _LEAST))


def _log_density(values: Floats, mean: Floats, spread: Floats) -> Floats:
    return -0.5 * ((values - mean) / spread) ** 2 - np.log(spread)


def attacked(scores: ArrayLike, member: ArrayLike, draws: int = 1000, seed: int = 0) -> Attack:
    """How well scores (n,) find the members (n,) among images, with intervals over images."""
    known, trained = np.asarray(scores, dtype=np.float64), np.asarray(member, dtype=bool)
    members, others = int(trained.sum()), int((~trained).sum())
    if not members or not others:
        nothing = (float("nan"),) * 3
        return Attack(members, others, nothing, nothing)
    _, place = np.unique(-known, return_inverse=True)  # the likeliest members first; equal scores share a place
    random = np.random.default_rng(seed)
    auc, found = np.empty(draws + 1), np.empty(draws + 1)
    auc[0], found[0] = _curve(_at(place, trained, None), _at(place, ~trained, None))
    for draw in range(1, draws + 1):
        inside = random.multinomial(members, np.full(members, 1 / members))
        outside = random.multinomial(others, np.full(others, 1 / others))
        auc[draw], found[draw] = _curve(_at(place, trained, inside), _at(place, ~trained, outside))
    return Attack(members, others, _with_interval(auc), _with_interval(found))


def _at(place: NDArray[np.int64], chosen: NDArray[np.bool_], weights: NDArray[np.int64] | None) -> Floats:
    """How many of the chosen images stand at each place."""
    return np.bincount(place[chosen], weights, minlength=int(place.max()) + 1).astype(np.float64)


def _curve(members: Floats, others: Floats) -> tuple[float, float]:
    """Area under the curve, and members found at the highest allowed share of false positives."""
    positives, negatives = members / members.sum(), others / others.sum()
    missed = 1 - negatives.cumsum() + 0.5 * negatives
    allowed = negatives.cumsum() <= FALSE_POSITIVES + _LEAST
    return float((positives * missed).sum()), float(positives[allowed].sum())


def _with_interval(values: Floats) -> tuple[float, float, float]:
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return float(values[0]), float(low), float(high)
