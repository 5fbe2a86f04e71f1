"""Tables and verdicts of the page of results that come from `results/frozen/`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "frozen"
METRICS = ("balanced_accuracy", "macro_f1", "worst_class_recall")
HEADS = ("balanced accuracy", "macro F1", "worst class")
OURS, RIVALS = "equipoise", ("fednpr-per", "fediic", "fedbm", "prr", "local+balanced")
#: study, data set, patients, and what the page calls these
VIEWS = (
    ("dermoscopy", "", "own", "PRR's sites, own patients"),
    ("dermoscopy", "", "any", "PRR's sites, all patients"),
    ("isic", "", "own", "Fed-ISIC2019, own patients"),
    ("isic", "", "any", "Fed-ISIC2019, all patients"),
    ("ham10000", "Dirichlet 0.05", "any", "HAM10000, Dirichlet 0.05"),
    ("ham10000", "Dirichlet 0.1", "any", "HAM10000, Dirichlet 0.1"),
    ("pbc", "Dirichlet 0.05", "any", "PBC, Dirichlet 0.05"),
    ("pbc", "Dirichlet 0.1", "any", "PBC, Dirichlet 0.1"),
)
#: a paper's claim: the row that claims, the row that it claims to beat
CLAIMS = (
    ("PRR", "CPA", "prr", "prr without CPA"),
    ("PRR", "DET", "prr", "prr without DET"),
    ("PRR", "PFA", "prr", "prr without PFA"),
    ("FedNPR", "FedNPR-Per over FedAvg", "fednpr-per", "fedavg"),
    ("FedNPR", "NPR", "fednpr-per", "fednpr-per without NPR"),
    ("FedNPR", "Sinkhorn over random", "fednpr-per", "fednpr-per, random clusters"),
    ("FedIIC", "FedIIC over FedAvg", "fediic", "fedavg"),
    ("FedIIC", "margins", "fediic", "fediic without margins"),
    ("FedIIC", "intra-client contrast", "fediic", "fediic without intra-contrast"),
    ("FedIIC", "inter-client contrast", "fediic", "fediic without inter-contrast"),
    ("FedBM", "its generator", "fedbm", "fedbm without generator"),
    ("FedBM", "its classifier of text", "fedbm", "fedbm, learned classifier"),
)


@cache
def rows_of(study: str, data: str) -> dict[str, Any]:
    """The rows of a study on one data set."""
    found: dict[str, Any] = json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))["data"][data]
    return found


def score(study: str, data: str, patients: str, row: str, metric: str = METRICS[0]) -> float:
    """A row's mean over seeds."""
    return float(rows_of(study, data)[row][patients][metric]["mean"])


def core(study: str, data: str, patients: str) -> Iterator[tuple[str, ...]]:
    """The core rows, the highest balanced accuracy first, each score with its interval."""
    rows = {name: row for name, row in rows_of(study, data).items() if row["table"] == "Core" and patients in row}
    best = {metric: max(row[patients][metric]["mean"] for row in rows.values()) for metric in METRICS}
    for name, row in sorted(rows.items(), key=lambda pair: -pair[1][patients][METRICS[0]]["mean"]):
        told = []
        for metric in METRICS:
            own = row[patients][metric]
            mean = f"{own['mean']:.1f}"
            mean = f"**{mean}**" if own["mean"] == best[metric] else mean
            told.append(f"{mean} ({own['low']:.0f} to {own['high']:.0f})")
        yield (name, str(len(row["seeds"])), *told)


def gap(study: str, data: str, patients: str, first: str, second: str, metric: str) -> list[float] | None:
    """A difference with its interval and the probability that the first row is better; None where one is missing."""
    own = rows_of(study, data).get(first, {}).get("gaps", {}).get(patients, {}).get(second, {})
    return own.get(metric)


def told_gap(found: Sequence[float] | None) -> str:
    """A difference and its interval; bold where the interval excludes zero."""
    if found is None:
        return "not run"
    text = f"{found[0]:+.1f} ({found[1]:+.1f} to {found[2]:+.1f})"
    return f"**{text}**" if found[1] > 0 or found[2] < 0 else text


def verdict(found: Sequence[float] | None) -> str:
    """What an interval says of a claim."""
    if found is None:
        return "open"
    return "holds" if found[1] > 0 else "does not hold: the reverse" if found[2] < 0 else "not shown"


def goal() -> Iterator[tuple[str, ...]]:
    """Our recipe against the best rival of each score, on every data set."""
    for study, data, patients, title in VIEWS:
        rows = rows_of(study, data)
        if OURS not in rows:
            continue
        told = [title]
        for metric in METRICS:
            rivals = {name: rows[name][patients][metric]["mean"] for name in RIVALS if name in rows}
            best = max(rivals, key=lambda name: rivals[name])
            told.append(f"{told_gap(gap(study, data, patients, OURS, best, metric))}, {best}")
        yield tuple(told)


def exchange() -> Iterator[tuple[str, ...]]:
    """What rows gain over the local closed form in balanced accuracy: is exchange worth it?"""
    for study, data, patients, title in VIEWS:
        names = ("closed", "closed, common", OURS, "fedavg+balanced", "prr")
        yield (title, *(told_gap(gap(study, data, patients, name, "closed, local", METRICS[0])) for name in names))


def claims() -> Iterator[tuple[str, str, str, str, str]]:
    """Each claim's gain on PRR's sites: paper, claim, balanced accuracy, macro F1, verdict."""
    for paper, what, first, second in CLAIMS:
        gaps = [gap("dermoscopy", "", "own", first, second, metric) for metric in METRICS[:2]]
        yield (paper, what, *(told_gap(one) for one in gaps), verdict(gaps[0]))
