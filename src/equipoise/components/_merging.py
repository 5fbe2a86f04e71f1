"""Shared arithmetic: averages and totals of replies, folded site by site, and class means at a site and over sites."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import Tensor

from equipoise.aggregation import weighted_mean_by_name
from equipoise.contract.protocol import Replies, Sums, Tensors
from equipoise.losses import membership


def site_weights(replies: Replies, kind: str = "size") -> list[float]:
    """Un-normalised weight of each reply: its number of images, or 1. Of a sum, that of all sites together."""
    if isinstance(replies, Sums):
        return [float(replies.whole["examples"]) if kind == "size" else float(len(replies))]  # type: ignore[arg-type]
    return [float(reply["examples"]) if kind == "size" else 1.0 for reply in replies]


def average(replies: Replies, name: str = "model", kind: str = "size") -> Tensors:
    """Mean of a dict of tensors over sites, by their number of images or all alike; a sum has been averaged so."""
    if isinstance(replies, Sums):
        return replies.whole[name]  # type: ignore[return-value]
    return average_by(site_weights(replies, kind), replies, name)


def average_by(weights: Sequence[float], replies: Replies, name: str = "model") -> Tensors:
    """Mean of a dict of tensors over sites by given weights. Reads the tensors of one site at a time."""
    return weighted_mean_by_name((reply[name] for reply in replies), weights)


def merged_by_entry(replies: Replies, merge: Callable[[Tensor], Tensor], name: str = "model") -> Tensors:
    """A dict of tensors from `merge` of each entry's stacked tensors (K, ...); one entry of all sites at a time."""
    return {entry: merge(torch.stack([reply[name][entry] for reply in replies])) for entry in replies[0][name]}


def step_towards(old: Tensors, mean: Tensors, rate: float, spared: Container[str] = ()) -> Tensors:
    """A server step: each entry goes `rate` of the way from its old value to the sites' mean.

    Entries in `spared` take the plain mean, as running statistics should: a rate above 1 goes past the mean, which
    a variance must not.
    """
    if rate == 1:
        return mean
    return {name: value if name in spared else torch.lerp(old[name], value, rate) for name, value in mean.items()}


def total(replies: Replies, name: str) -> Tensor:
    """Sum of a tensor over sites."""
    if isinstance(replies, Sums):
        return replies.whole[name]  # type: ignore[return-value]
    return torch.stack([reply[name] for reply in replies]).sum(0)


def class_sums(features: Tensor, labels: Tensor, num_classes: int) -> Tensors:
    """Summed features (C, D) and number of samples (C,) of each class in a batch (B, D): what a `Scan` adds up."""
    members = membership(labels, num_classes, features.dtype)
    return {"sums": members.T @ features, "counts": members.sum(0)}


def class_means(sums: Tensor, counts: Tensor) -> Tensor:
    """Class means (C, ...) from sums (C, ...) over `counts` (C,) samples; zeros for a class without any."""
    return sums / _per_class(counts.clamp(min=1), sums)


def mean_by_class(replies: Replies, name: str, kind: str = "size", by: str = "class_counts") -> tuple[Tensor, Tensor]:
    """Mean over sites of their class means (C, ...), and the mask (C,) of the classes that any of them has.

    A site counts for a class by its number of images of it, the reply's entry `by` (C,), or as much as every other
    site that has the class ("uniform", for which a mask is enough); for a class that it lacks, not at all.
    """
    if isinstance(replies, Sums):
        return replies.whole[name], replies.whole[by] > 0  # type: ignore[operator, return-value]
    sums = torch.zeros_like(replies[0][name])
    weights = sums.new_zeros(len(sums))
    for reply in replies:
        counts = reply[by]
        weight = (counts if kind == "size" else counts > 0).to(sums.dtype)
        sums += _per_class(weight, sums) * reply[name]
        weights += weight
    return class_means(sums, weights), weights > 0


def _per_class(values: Tensor, like: Tensor) -> Tensor:
    """Values (C,) shaped to broadcast over `like` (C, ...)."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def shuffled_batches(size: int, batch: int, passes: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Positions of `size` samples in batches, shuffled anew in each of some passes; for heads on kept features."""
    for _ in range(passes):
        yield from torch.randperm(size, generator=generator, device=generator.device).split(batch)
