"""What a row costs: size and operations of its net, what sites send, and time, beside FedAvg's in the same study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from equipoise.report.summary import duration, traffic
from equipoise.statistics import Spread
from equipoise.studies.grid import listed
from equipoise.studies.results import StudyResults
from equipoise.studies.rows import RowResult

COST_TITLES = (
    "Parameters",
    "Model",
    "FLOPs per image",
    "Sent per round",
    "Received per round",
    "Seconds per round",
    "Time per run",
    "Relative time",
    "Relative traffic",
)
#: a share below this has no digit left with two decimals
SMALL_SHARE = 0.01


def cost(results: StudyResults, row: RowResult) -> dict[str, Any]:
    """Size, operations, traffic and time of a row, and the last two relative to FedAvg's, if there is such a row.

    Runs that share a device wait for each other: their times do not compare methods.
    """
    base = base_line(results.of(row.data))
    net = row.runs[0].cost
    return {
        "parameters": net.parameters if net else row.runs[0].record.start.parameters,
        "model_bytes": net.model_bytes if net else None,
        "flops_per_image": net.flops if net else None,
        "sent_per_round": row.traffic("sent"),
        "sent_by_entry": row.sent_by_entry,
        "received_per_round": row.traffic("received"),
        "seconds_per_round": row.seconds.mean if row.seconds else None,
        "seconds": row.duration.mean if row.duration else None,
        "together": row.together,
        "relative_seconds": _ratio(row.seconds, base.seconds) if base and base.together == row.together == 1 else None,
        "relative_traffic": _relative_traffic(row, base) if base and not row.pooled else None,
    }


def base_line(rows: Sequence[RowResult]) -> RowResult | None:
    """The row that costs are relative to: the first of FedAvg that has runs."""
    return next((row for row in rows if row.row.method == "fedavg" and row.runs), None)


def _ratio(own: Spread | None, base: Spread | None) -> float | None:
    return own.mean / base.mean if own and base and base.mean else None


def _relative_traffic(row: RowResult, base: RowResult) -> float | None:
    own, whole = (sum(each.traffic(way) or 0 for way in ("sent", "received")) for each in (row, base))
    return own / whole if whole else None


def cost_cells(results: StudyResults, row: RowResult) -> list[str]:
    """Size, operations, traffic and time in words, under `COST_TITLES`."""
    own = cost(results, row)

    def told(key: str, form: Callable[[Any], str]) -> str:
        return form(own[key]) if own[key] is not None else "–"

    return [
        told("parameters", "{:,}".format),
        told("model_bytes", traffic),
        told("flops_per_image", "{:.3g}".format),
        told("sent_per_round", traffic),
        told("received_per_round", traffic),
        told("seconds_per_round", "{:.2f}".format),
        told("seconds", duration),
        told("relative_seconds", _share),
        told("relative_traffic", _share),
    ]


def _share(value: float) -> str:
    return f"{value:.2f}" if value == 0 or value >= SMALL_SHARE else f"{value:.1g}"


def cost_caption(rows: Sequence[RowResult]) -> str:
    """What a table of costs shows."""
    base = base_line(rows)
    relative = f"; relative to {base.row.name} in the last columns" if base else ""
    return (
        "Cost: the net with its classifier (what a method adds, such as a projector or a second net, counts in what is "
        f"sent), traffic of a site, and clock time{relative}."
    )


def shared_times(rows: Sequence[RowResult]) -> list[str]:
    """What to know about the times of runs that shared a device; nothing where none did."""
    shared = max((row.together for row in rows), default=1)
    if shared == 1:
        return []
    return [f"Up to {shared} runs shared the device and waited for each other: times compare no methods."]


def sent_entries(rows: Sequence[RowResult]) -> list[str]:
    """What makes up the traffic of rows that send more than one thing of some size."""
    found: dict[str, list[str]] = {}
    for row in rows:
        told = [f"{entry} {traffic(size)}" for entry, size in row.sent_by_entry.items() if size > 8]  # no mere count
        if len(told) > 1:
            found.setdefault(", ".join(told), []).append(row.row.name)
    unknown = [row.row.name for row in rows if row.traffic("sent") and not row.pooled and not row.sent_by_entry]
    told = [f"Sent by {listed(names)}: {parts}." for parts, names in found.items()]
    return [*told, f"Parts not recorded: {listed(unknown)}."] if told and unknown else told


def pooled_rows(rows: Sequence[RowResult]) -> list[str]:
    """What to know about rows that train on all images at one place."""
    names = [row.row.name for row in rows if row.runs and row.pooled]
    return [f"{listed(names)}: no model travels, but all images would."] if names else []
