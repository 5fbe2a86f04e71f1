"""PRR-Imbalance's PFA on whole models: every layer of every site's deputy, one layer of all sites at a time.

Chen et al., 2022, Section III-B; the transform itself is `fourier_average`.
"""

from __future__ import annotations

import torch
from torch import nn

from equipoise.aggregation import fourier_average, weighted_mean
from equipoise.engine.protocol import Replies, Tensors
from equipoise.nets import groups


def layer_kinds(net: nn.Module, classifier_rows: bool = True) -> dict[str, str]:
    """How PFA reads each entry that travels: "conv", "linear", "classifier", or "" where it is averaged plainly."""
    named, state = groups(net), net.state_dict()
    kinds = {}
    for entry in (*named["body"], *named["head"]):
        by_row = classifier_rows and entry in named["head"]
        kinds[entry] = {4: "conv", 2: "classifier" if by_row else "linear"}.get(state[entry].dim(), "")
    return kinds


def merge_deputies(
    updates: Replies, kinds: dict[str, str], band: float, phase: str = "angle", parts: str = "both"
) -> tuple[Tensors, Tensors]:
    """The plain mean of the deputies, and each site's own merged deputy as entries named `site/entry`.

    Sites count alike, as in Eqs. 3 and 4. Biases and other entries without a spatial order get the plain mean.
    """
    mean: Tensors = {}
    merged: Tensors = {}
    for entry, kind in kinds.items():
        tensors = torch.stack([reply["model"][entry] for reply in updates])
        mean[entry] = weighted_mean(tensors, [1.0] * len(updates))
        own = fourier_average(tensors, band, kind, phase, parts) if kind else mean[entry].expand_as(tensors)
        # Clones, for a view would hold on to the tensors of all sites.
        merged |= {
            f"{site}/{entry}": tensor.clone(memory_format=torch.contiguous_format)
            for site, tensor in zip(updates.sites, own)
        }
    return mean, merged
