"""What a run's net costs: its size, and the floating-point operations of predicting one image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from equipoise.core.errors import UserError
from equipoise.nets import NetConfig, build_net


@dataclass(frozen=True)
class NetCost:
    """Parameters, bytes of the whole state (batch-norm statistics too) and operations per image."""

    parameters: int
    model_bytes: int
    flops: int


def net_cost(start: Mapping[str, Any]) -> NetCost | None:
    """The cost of the net of a run, from its start event; None where the net cannot be built here.

    Operations are those of convolutions and matrix products, a multiplication and an addition counted as two.
    """
    config = start["config"]
    size = config["augment"]["size"] or start["image_size"]
    net = NetConfig.model_validate({**config["net"], "weights": "none"})
    try:
        return _measure(net.model_dump_json(), len(start["classes"]), start["channels"], size)
    except UserError:  # a package of the net is missing on this machine
        return None


@cache
def _measure(net_json: str, classes: int, channels: int, size: int) -> NetCost:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        net = build_net(NetConfig.model_validate_json(net_json), classes, channels).eval()
        with FlopCounterMode(display=False) as counter:
            net(torch.zeros(1, channels, size, size))
    state = net.state_dict().values()
    return NetCost(
        parameters=sum(p.numel() for p in net.parameters()),
        model_bytes=sum(t.numel() * t.element_size() for t in state),
        flops=counter.get_total_flops(),
    )
