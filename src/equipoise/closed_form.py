"""A linear classifier in closed form, from sums over images: Gram matrix, class sums and class counts.

Sums of sites add up to the sums of the pooled images. So the classifier does not depend on who has which image.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.losses import membership

#: sums are whole multiples of this: up to 2**20 in size they then add up and subtract without any rounding
GRID = 2.0**-32
#: directions with less than this share of the largest variance are noise, and are left out
LEAST_VARIANCE = 1e-6
#: an absent class scores so much below the lowest of the others
BELOW = 30.0


class Sums(NamedTuple):
    """What a classifier needs to know of images with features z (n, D).

    Attributes:
        gram: sum of z z^T (D, D)
        by_class: sum of z over each class (C, D)
        counts: images of each class (C,)
    """

    gram: Tensor
    by_class: Tensor
    counts: Tensor

    def plus(self, other: Sums, share: float = 1.0) -> Sums:
        """These sums and a share of others."""
        return Sums(*(mine + share * theirs for mine, theirs in zip(self, other, strict=True)))

    def first(self, components: int) -> Sums:
        """The sums over the first components alone."""
        return Sums(self.gram[:components, :components], self.by_class[:, :components], self.counts)


def sums_of(features: Tensor, labels: Tensor, num_classes: int) -> Sums:
    """The sums over images with features (n, D) and labels (n,), in float64."""
    features = features.double()
    member = membership(labels, num_classes, features.dtype)
    return Sums(features.T @ features, member.T @ features, member.sum(0))


def on_grid(numbers: Tensor) -> Tensor:
    """The nearest whole multiples of `GRID`, which float64 adds and subtracts exactly up to 2**20."""
    return torch.round(numbers.double() / GRID) * GRID


def packed(symmetric: Tensor) -> Tensor:
    """The upper triangle (D (D + 1) / 2,) of a symmetric matrix (D, D)."""
    rows, columns = torch.triu_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[rows, columns]


def unpacked(triangle: Tensor) -> Tensor:
    """The inverse of `packed`."""
    size = (math.isqrt(8 * len(triangle) + 1) - 1) // 2
    rows, columns = torch.triu_indices(size, size, device=triangle.device)
    whole = triangle.new_zeros(size, size)
    whole[rows, columns] = triangle
    whole[columns, rows] = triangle
    return whole


def off_diagonal(length: int) -> Tensor:
    """What noise on a packed symmetric matrix is times: 1 on the diagonal, 1 / sqrt(2) beside it.

    An entry beside the diagonal stands for two of the matrix. So noise of deviation s on the matrix (as a vector of
    length 1 changes it by at most 1) is s / sqrt(2) on these.
    """
    size = (math.isqrt(8 * length + 1) - 1) // 2
    rows, columns = torch.triu_indices(size, size)
    return torch.where(rows == columns, 1.0, 0.5**0.5)


# ---- features ------------------------------------------------------------------------------------------------


def principal(gram: Tensor, total: Tensor, count: float, components: int) -> tuple[Tensor, Tensor]:
    """Mean (D,) and whitening (D, K) of features, from their Gram matrix, their sum (D,) and their number.

    K is at most `components`; directions without variance are left out. Whitened features have covariance 1.
    """
    mean = total / max(count, 1.0)
    covariance = gram / max(count, 1.0) - torch.outer(mean, mean)
    variances, directions = torch.linalg.eigh(covariance)
    variances, directions = variances.flip(0)[:components], directions.flip(1)[:, :components]
    kept = variances > LEAST_VARIANCE * variances[:1].clamp(min=torch.finfo(variances.dtype).tiny)
    directions, variances = directions[:, kept], variances[kept]
    if directions.shape[1]:  # eigenvectors have no sign: the largest entry is positive
        largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
        directions = directions * largest.sign()
    return mean, directions / variances.sqrt()


def unit(features: Tensor) -> Tensor:
    """Features (n, D) of unit length; zeros stay."""
    return torch.nn.functional.normalize(features, dim=1)


def whitened(features: Tensor, mean: Tensor, whitening: Tensor) -> Tensor:
    """Whitened features (n, K) of unit length, in float64."""
    return unit((features.double() - mean.double()) @ whitening.double())


# ---- classifiers ----------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """A linear classifier: weights (K, C), offsets (C,), and the classes (C,) that any image had."""

    weights: Tensor
    offsets: Tensor
    known: Tensor

    def scores(self, features: Tensor) -> Tensor:
        """Scores (n, C) of features (n, K); an absent class is below all others, without any class all are 0."""
        found = features @ self.weights + self.offsets
        lowest = found.masked_fill(~self.known, torch.inf).amin(1, keepdim=True) - BELOW
        return torch.where(self.known, found, torch.where(self.known.any(), lowest, 0.0))


def _means(sums: Sums, least: float) -> tuple[Tensor, Tensor, Tensor]:
    """Class counts (C,), class means (C, K) and the mask (C,) of the classes with at least so many images."""
    known = sums.counts >= least
    counts = torch.where(known, sums.counts, 0.0)
    return counts, sums.by_class / counts.clamp(min=least)[:, None] * known[:, None], known


class Within(NamedTuple):
    """Class counts (C,), class means (C, K), known classes (C,), and the axes of the covariance within classes."""

    counts: Tensor
    means: Tensor
    known: Tensor
    variances: Tensor
    directions: Tensor

    def head(self, shrinkage: float, prior: float) -> Head:
        """Linear discriminant analysis with this shrinkage and these priors."""
        number = self.counts.sum().clamp(min=1e-300)
        spread = self.variances.mean()
        shrunk = (1 - shrinkage) * self.variances + shrinkage * spread
        floor = 1e-10 * spread
        shrunk = torch.where(spread > 1e-12, shrunk.clamp(min=floor), 1.0)
        weights = self.directions @ ((self.directions.T @ self.means.T) / shrunk[:, None])
        share = (self.counts / number).clamp(min=1e-300)
        offsets = -0.5 * (self.means.T * weights).sum(0) + prior * share.log()
        return Head(weights, torch.where(self.known, offsets, 0.0), self.known)


def within(sums: Sums, least: float = 1e-9) -> Within:
    """The covariance within classes; those of fewer images than `least` are absent."""
    counts, means, known = _means(sums, least)
    covariance = (sums.gram - (means.T * counts) @ means) / counts.sum().clamp(min=1e-300)
    variances, directions = torch.linalg.eigh(covariance)
    return Within(counts, means, known, variances.clamp(min=0), directions)  # noise can make them negative


def discriminant(sums: Sums, shrinkage: float = 0.3, prior: float = 0.25, least: float = 1e-9) -> Head:
    """Linear discriminant analysis: score_c = mu_c^T S^-1 z - mu_c^T S^-1 mu_c / 2 + prior log(n_c / n).

    S = (1 - shrinkage) W + shrinkage (tr W / K) 1, where W is the covariance within classes. Where that vanishes (one
    image), S is the identity: the nearest class mean wins.

    Args:
        prior: exponent of the classes' shares: 1 as in the data, 0 all alike, which finds more of the rare classes
        least: classes of fewer images are absent
    """
    return within(sums, least).head(shrinkage, prior)


def ridge(sums: Sums, strength: float = 1.0, prior: float = 0.25, least: float = 1e-9) -> Head:
    """Ridge regression on class membership: weights (G - n m m^T + strength 1)^-1 (S_c - n_c m), m the mean of all.

    The scores estimate each class's probability. Divided by (n_c / n)^(1 - prior), they have other priors.
    """
    counts, _, known = _means(sums, least)
    number = counts.sum().clamp(min=1e-300)
    mean = (sums.by_class * known[:, None]).sum(0) / number
    scatter = sums.gram - number * torch.outer(mean, mean)
    moments = (sums.by_class * known[:, None]).T - torch.outer(mean, counts)
    variances, directions = torch.linalg.eigh(scatter)
    shrunk = (variances.clamp(min=0) + strength).clamp(min=1e-12)
    weights = directions @ ((directions.T @ moments) / shrunk[:, None])
    share = counts / number
    offsets = share - mean @ weights
    factor = torch.where(known, share.clamp(min=1e-300) ** (prior - 1), 0.0)
    return Head(weights * factor, offsets * factor, known)


# ---- differential privacy -------------------------------------------------------------------------------------


def noise_scale(epsilon: float, delta: float, releases: int = 1) -> float:
    """Standard deviation of the Gaussian noise on every sum that makes its release (epsilon, delta)-private.

    One image of unit length more changes Gram matrix, class sums and counts by at most 1 each, so all by sqrt(3).
    Several releases of this kind are together as private as one that changes by sqrt(3 releases).
    """
    from dp_accounting.pld.common import DifferentialPrivacyParameters
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    wanted = DifferentialPrivacyParameters(epsilon, delta)
    loss = GaussianPrivacyLoss.from_privacy_guarantee(wanted, sensitivity=math.sqrt(3 * releases))
    return float(loss.standard_deviation)
