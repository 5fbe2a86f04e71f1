"""PRR-Imbalance's PFA on whole models: every layer of every site's deputy, layers of one shape at a time.

Chen et al., 2022, Section III-B; the transform itself is `fourier_average`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from equipoise.aggregation import MOST_TRANSFORMED, fourier_average, weighted_mean
from equipoise.contract.protocol import Replies, Tensors
from equipoise.nets import groups as entry_groups


def layer_kinds(net: nn.Module, classifier_rows: bool = True) -> dict[str, str]:
    """How PFA reads each entry that travels: "conv", "linear", "classifier", or "" where it is averaged plainly."""
    named, state = entry_groups(net), net.state_dict()
    kinds = {}
    for entry in (*named["body"], *named["head"]):
        by_row = classifier_rows and entry in named["head"]
        dimensions = state[entry].dim()
        if by_row and dimensions in (2, 4):  # of a head that is a 1x1 convolution, too
            kinds[entry] = "classifier"
        else:
            kinds[entry] = {4: "conv", 2: "linear"}.get(dimensions, "")
    return kinds


def merge_deputies(
    updates: Replies, kinds: dict[str, str], band: float, phase: str = "angle", parts: str = "both"
) -> tuple[Tensors, Tensors]:
    """The plain mean of the deputies, and each site's own merged deputy as entries named `site/entry`.

    Sites count alike, as in Eqs. 3 and 4. Biases and other entries without a spatial order get the plain mean.
    """
    mean: Tensors = {}
    merged: Tensors = {}
    for entries in _alike(updates, kinds):
        kind = kinds[entries[0]]
        tensors = torch.stack([torch.stack([reply["model"][entry] for entry in entries]) for reply in updates])
        means = weighted_mean(tensors, [1.0] * len(updates))
        signals = tensors.flatten(3) if kind == "classifier" else tensors
        own = fourier_average(signals, band, kind, phase, parts) if kind else means
        own = own.reshape(tensors.shape) if kind else own.expand_as(tensors)
        # Clones, for a view would hold on to the tensors of all sites.
        mean |= {entry: tensor.clone() for entry, tensor in zip(entries, means)}
        merged |= {
            f"{site}/{entry}": tensor.clone(memory_format=torch.contiguous_format)
            for site, layers in zip(updates.sites, own)
            for entry, tensor in zip(entries, layers)
        }
    return {entry: mean[entry] for entry in kinds}, merged


def _alike(updates: Replies, kinds: dict[str, str]) -> Iterator[list[str]]:
    """Entries that are merged together: of one kind and shape, and not too many values of all sites at a time."""
    groups: dict[tuple[str, torch.Size], list[str]] = {}
    for entry, kind in kinds.items():
        groups.setdefault((kind, updates[0]["model"][entry].shape), []).append(entry)
    for (_, shape), entries in groups.items():
        together = max(MOST_TRANSFORMED // max(len(updates) * shape.numel(), 1), 1)
        for start in range(0, len(entries), together):
            yield entries[start : start + together]
