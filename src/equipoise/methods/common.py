"""What several methods share: what a server does with replies (averages and totals, folded tensor by tensor in site
order), and which entries of a net travel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.aggregation import weighted_mean
from equipoise.engine.protocol import Replies, Tensors
from equipoise.nets import groups


def all_but(net: nn.Module, *names: str) -> tuple[str, ...]:
    """The state-dict names of a net outside some of its groups (body, head, norm, statistics), in its order."""
    left_out = {entry for name in names for entry in groups(net)[name]}
    return tuple(entry for entry in net.state_dict() if entry not in left_out)


def site_weights(replies: Replies, kind: str = "size") -> list[float]:
    """Un-normalised weight of each reply: its number of images, or 1."""
    return [float(reply["examples"]) if kind == "size" else 1.0 for reply in replies]


def average(replies: Replies, name: str = "model", kind: str = "size") -> Tensors:
    """Weighted mean of a dict of tensors over sites. Reads one tensor of one site at a time."""
    weights = site_weights(replies, kind)
    return {
        entry: weighted_mean((reply[name][entry] for reply in replies), weights) for entry in replies[0][name]
    }


def total(replies: Replies, name: str) -> Tensor:
    """Sum of a tensor over sites."""
    return torch.stack([reply[name] for reply in replies]).sum(0)
