"""What the closed form of a classifier shares: its options, how a site takes its sums, and how a server adds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from equipoise.closed_form import (
    Head,
    Sums,
    discriminant,
    on_grid,
    packed,
    ridge,
    sums_of,
    unpacked,
)
from equipoise.contract.component import Options
from equipoise.contract.disclosed import Entry
from equipoise.contract.method import Batch
from equipoise.contract.protocol import Replies, Tensors
from equipoise.contract.protocol import Sums as WholeReply
from equipoise.contract.summed import added

#: the entries of sums, and their lines in the disclosure sheet
ENTRIES = ("gram", "by_class", "class_counts")
SUM_ENTRIES: Mapping[str, str] = {
    "gram": added("sum of the products of whitened features of unit length, over the images not sent before"),
    "by_class": added(
        Entry(
            "sum of these features of each class, over the images not sent before; of a class with one image, that "
            "image's feature"
        )
    ),
    "class_counts": added("number of the site's training images of each class, less those sent before"),
}
MOMENT_ENTRIES: Mapping[str, str] = {
    "gram": added("sum of the products of raw features: with fewer images than features, it shows their span"),
    "sums": added("sum of the raw features"),
    "number": added("number of training images in these sums"),
}


class ClosedFormOptions(Options):
    """The classifier in closed form."""

    prior: float = Field(
        0.25,
        ge=0,
        le=1,
        description="exponent of the classes' shares; 0: finds more rare classes, with more false alarms",
    )
    classifier: Literal["lda", "ridge"] = Field("lda", description="linear discriminant analysis, or ridge regression")
    shrinkage: float = Field(0.3, ge=0, le=1, description="lda: share of the covariance that becomes a sphere")
    strength: NonNegativeFloat = Field(1.0, description="ridge: penalty on the squared weights")
    dimensions: PositiveInt = Field(256, description="principal components of the features, at most")
    per_dimension: NonNegativeFloat = Field(
        8.0, description="for each component at least so many images of a site (mean over sites); 0: no such limit"
    )

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return {"strength" if self.classifier == "lda" else "shrinkage": f"classifier is {self.classifier}"}

    def most_components(self, images: float, sites: int, features: int) -> int:
        """The components of a run: an eighth of a site's images by default, where the sites have the mean number."""
        most = min(self.dimensions, features)
        if self.per_dimension:
            most = min(most, int(images / max(sites, 1) / self.per_dimension))
        return max(most, 1)

    def head(self, sums: Sums, least: float = 1e-9) -> Head:
        """The classifier of some sums."""
        if self.classifier == "ridge":
            return ridge(sums, self.strength, self.prior, least)
        return discriminant(sums, self.shrinkage, self.prior, least)


# ---- at a site --------------------------------------------------------------------------------------------------

Features = Callable[[Batch], Tensor]


def moments_by(features: Features, taken: Tensor) -> Callable[[Batch], Tensors]:
    """A scan's function: Gram matrix (packed), sum and number of raw features, over the classes of a mask (C,)."""

    def found(batch: Batch) -> Tensors:
        weights = taken[batch.label].double()
        rows = features(batch).double() * weights[:, None]
        return {"gram": packed(rows.T @ rows), "sums": rows.sum(0), "number": weights.sum()}

    return found


def sums_by(features: Features, taken: Tensor, num_classes: int) -> Callable[[Batch], Tensors]:
    """A scan's function: the sums of features that are ready, over all images and over the classes of a mask (C,)."""

    def found(batch: Batch) -> Tensors:
        rows = features(batch).double()
        own = _named(sums_of(rows, batch.label, num_classes))
        told = _named(sums_of(rows * taken[batch.label, None], batch.label, num_classes))
        told["class_counts"] = own["class_counts"] * taken
        return {f"own {name}": own[name] for name in ENTRIES} | {f"told {name}": told[name] for name in ENTRIES}

    return found


def _named(sums: Sums) -> Tensors:
    return dict(zip(ENTRIES, (packed(sums.gram), sums.by_class, sums.counts), strict=True))


def gridded(found: Tensors) -> Tensors:
    """Sums as whole multiples of the grid, which add up exactly."""
    return {name: on_grid(value) for name, value in found.items()}


def as_sums(found: Mapping[str, Tensor]) -> Sums:
    """The sums among some named tensors."""
    return Sums(unpacked(found["gram"]), found["by_class"], found["class_counts"])


def no_sums(size: int, num_classes: int) -> Tensors:
    """Sums over no image: packed Gram matrix, class sums and counts."""
    zeros = torch.zeros(size * (size + 1) // 2, dtype=torch.float64)
    return dict(zip(ENTRIES, (zeros, zeros.new_zeros(num_classes, size), zeros.new_zeros(num_classes)), strict=True))


def wide(whitening: Tensor, most: int) -> Tensor:
    """The whitening (D, K) with columns of zeros up to `most`: what is sent always has one shape."""
    return torch.nn.functional.pad(whitening, (0, most - whitening.shape[1]))


# ---- on the server ----------------------------------------------------------------------------------------------


def total_of(replies: Replies, name: str) -> Tensor:
    """The sum over sites of an entry, one site at a time."""
    if isinstance(replies, WholeReply):
        return replies.whole[name]  # type: ignore[return-value]
    found = None
    for reply in replies:
        found = reply[name].clone() if found is None else found.add_(reply[name])
    assert found is not None
    return found
