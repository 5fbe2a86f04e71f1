"""What a row costs: size and operations of its net, what sites send, and time, beside FedAvg's in the same study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from equipoise.core.errors import UserError
from equipoise.nets import NetConfig, build_net
from equipoise.report.wording import UNKNOWN, duration, traffic
from equipoise.studies.grid import listed

if TYPE_CHECKING:
    from equipoise.studies.rows import RowResult

#: a share below this has no digit left with two decimals
SMALL_SHARE = 0.01


def _share(value: float) -> str:
    return f"{value:.2f}" if value == 0 or value >= SMALL_SHARE else f"{value:.1g}"


#: the columns of a table of costs: which cost, and how it is written
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Parameters": ("parameters", "{:,}".format),
    "Model size": ("model_bytes", traffic),
    "FLOPs per image": ("flops_per_image", "{:.3g}".format),
    "Sent per round": ("sent_per_round", traffic),
    "Received per round": ("received_per_round", traffic),
    "Seconds per round": ("seconds_per_round", "{:.2f}".format),
    "Time per run": ("seconds", duration),
    "Relative time": ("relative_seconds", _share),
    "Relative traffic": ("relative_traffic", _share),
}


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
    channels = start["channels"]
    try:
        if net.frozen:
            channels, size = start["features"][0], start["features"][2]
        return _measure(net.model_dump_json(), len(start["classes"]), channels, size)
    except UserError:  # a package of the net is missing on this machine
        return None


@cache
def _measure(net_json: str, classes: int, channels: int, size: int) -> NetCost:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        net = build_net(NetConfig.model_validate_json(net_json), classes, channels).eval()
        with FlopCounterMode(display=False) as counter:
            net(torch.zeros(1, channels, size, size))
    return NetCost(
        parameters=sum(p.numel() for p in net.parameters()),
        model_bytes=sum(t.numel() * t.element_size() for t in net.state_dict().values()),
        flops=counter.get_total_flops(),
    )


def row_cost(row: RowResult, beside: Sequence[RowResult]) -> dict[str, Any]:
    """What a row costs, and time and traffic relative to FedAvg's, if there is such a row.

    Runs that share a device wait for each other: their times do not compare methods.
    """
    base = base_line(beside)
    own, other = row.cost, base.cost if base else {}
    alone = other.get("together") == own["together"] == 1
    moved = None if row.pooled or not base else _ratio(_both_ways(own), _both_ways(other))
    seconds = _ratio(own["seconds_per_round"], other["seconds_per_round"]) if alone else None
    return own | {"relative_seconds": seconds, "relative_traffic": moved}


def base_line(rows: Sequence[RowResult]) -> RowResult | None:
    """The row that costs are relative to: the first of FedAvg that has runs."""
    return next((row for row in rows if row.row.method == "fedavg" and row.runs), None)


def _both_ways(cost: Mapping[str, Any]) -> float:
    return (cost["sent_per_round"] or 0) + (cost["received_per_round"] or 0)


def _ratio(own: float, base: float) -> float | None:
    return own / base if base else None


def cost_cells(row: RowResult, beside: Sequence[RowResult]) -> list[str]:
    """Size, operations, traffic and time in words, in the order of `COLUMNS`."""
    own = row_cost(row, beside)
    return [UNKNOWN if own[key] is None else form(own[key]) for key, form in COLUMNS.values()]


def cost_caption(rows: Sequence[RowResult]) -> str:
    """What a table of costs shows, and what to know of single rows."""
    base = base_line(rows)
    relative = f"; relative to {base.row.name} in the last columns" if base else ""
    text = (
        "Cost: the net with its classifier (what a method adds, such as a projector or a second net, counts in what is "
        f"sent), traffic of a site, and clock time{relative}."
    )
    pooled = [row.row.name for row in rows if row.runs and row.pooled]
    apart = [f"{listed(pooled)}: no model travels, but all images would."] if pooled else []
    return " ".join([text, *shared_times(rows), *apart, *_sent_entries(rows)])


def shared_times(rows: Sequence[RowResult]) -> list[str]:
    """What to know about the times of runs that shared a device; nothing where none did."""
    shared = max((row.together for row in rows), default=1)
    if shared == 1:
        return []
    return [f"Up to {shared} runs shared the device and waited for each other: times compare no methods."]


def _sent_entries(rows: Sequence[RowResult]) -> list[str]:
    """What makes up the traffic of rows that send more than one thing of some size."""
    found: dict[str, list[str]] = {}
    for row in rows:
        sizes = row.cost["sent_by_entry"].items()
        told = [f"{entry} {traffic(size)}" for entry, size in sizes if size > 8]  # no mere count
        if len(told) > 1:
            found.setdefault(", ".join(told), []).append(row.row.name)
    unknown = [row.row.name for row in rows if row.cost["sent_per_round"] and not row.cost["sent_by_entry"]]
    told = [f"Sent by {listed(names)}: {parts}." for parts, names in found.items()]
    return [*told, f"Parts not recorded: {listed(unknown)}."] if told and unknown else told
