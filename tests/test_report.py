"""Reports: what the page and the tables say equals what the events say, on made-up runs of known content."""

import csv
import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.errors import UserError
from equipoise.report import headline, read_run, to_csv, to_latex, write_report
from equipoise.report.comparison import class_recall, run_labels
from equipoise.report.curves import mean_curve, metric_curves, retrogress
from equipoise.report.summary import duration, left_out, ranges, traffic
from equipoise.report.tables import best_values, percent, selection_note

CLASSES = ["nevus", "melanoma", "keratosis", "vascular"]
TRAIN = {
    "Vienna": [820, 96, 210, 0],
    "Sydney": [310, 140, 55, 22],
    "Barcelona": [640, 75, 130, 9],
    "Ljubljana": [95, 60, 14, 4],
}
ROUNDS = 12
MISSING_ROUND = 5
HOSTILE = "</text></svg><script>alert('x')</script>$&\"_1"
FIGURES = ["learning", "retrogress", "loss", "recall", "confusion", "cost", "federation"]


def scores(confusion: np.ndarray, loss: float) -> dict[str, Any]:
    """Metrics of a confusion matrix over the classes present, in the shape of an evaluation event."""
    support, predicted, right = confusion.sum(1), confusion.sum(0), np.diag(confusion)
    present = support > 0
    recall = right[present] / support[present]
    f1 = 2 * right[present] / (support + predicted)[present]
    metrics = {
        "balanced_accuracy": float(recall.mean()),
        "macro_f1": float(f1.mean()),
        "accuracy": float(right.sum() / support.sum()),
        "balanced_auc": float(0.5 + recall.mean() / 2),
        "ece": float(0.2 - recall.mean() / 8),
        "loss": loss,
        "worst_class_recall": float(recall.min()),
    }
    per_class = [float(r / s) if s else None for r, s in zip(right, support)]
    return {"metrics": metrics, "recall": per_class, "confusion": confusion.tolist()}


def matrix(rng: np.random.Generator, support: list[int], skill: float) -> np.ndarray:
    """A confusion matrix of a model that knows frequent classes better than rare ones."""
    rows = []
    for true, count in enumerate(support):
        right = np.clip(skill - 0.13 * true, 0.05, 0.97)
        share = np.full(len(support), (1 - right) / (len(support) - 1))
        share[true] = right
        rows.append(rng.multinomial(count, share))
    return np.array(rows)


def site_events(train: dict[str, list[int]]) -> list[dict[str, Any]]:
    tenth = {name: [-(-count // 8) for count in counts] for name, counts in train.items()}
    return [
        {"name": name, "train": counts, "valid": tenth[name], "test": [2 * count for count in tenth[name]]}
        for name, counts in train.items()
    ]


def run_events(method: str, view: str, train: dict[str, list[int]], rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """The events of a finished run of `rounds` rounds whose sites end each round with a model of `view`."""
    rng = np.random.default_rng(seed)
    sites = site_events(train)
    config = {"rounds": rounds, "seed": seed, "method": {"name": method}, "training": {"batch_size": 32}}
    yield {
        "event": "start", "time": "2025-03-04T10:20:30", "run": f"{method}-demo", "method": method, "version": "0.1.0",
        "config": config, "classes": CLASSES, "sites": sites, "evaluators": [],
        "warnings": ["Vienna has no training image of vascular"],
        "disclosure": {"train": {"model": "the weights after local training", "count": "number of training images"}},
        "paper": "McMahan et al., AISTATS 2017", "parameters": 2_370_000, "model_bytes": 9_100_000,
    }  # fmt: skip
    gain = 0.12 if view == "personal" else 0.0
    best = (0, -1.0)
    for number in range(rounds + 1):
        skill = 0.45 + gain + 0.42 * (1 - np.exp(-number / 4))
        away = "Ljubljana" if number == MISSING_ROUND else None
        if number:
            yield round_event(rng, number, train, away)
        values = []
        for site in sites:
            if number and site["name"] != away:
                trained = matrix(rng, site["valid"], skill + (0.1 - gain / 2) * np.exp(-number / 6))
                yield evaluation(number, "trained", site["name"], trained, 2.0 / (number + 1))
            ended = matrix(rng, site["valid"], skill)
            event = evaluation(number, view, site["name"], ended, 2.2 / (number + 1) ** 0.5)
            values.append(event["metrics"]["balanced_accuracy"])
            yield event
        if np.mean(values) > best[1]:
            best = (number, float(np.mean(values)))
    chosen = {"rule": "best", "round": best[0], "view": view}
    yield {"event": "selection", "metric": "balanced_accuracy", "value": best[1], **chosen}
    yield from final_events(rng, sites, chosen, 0.8 + gain)
    yield {"event": "end", "seconds": 754.0}


def round_event(rng: np.random.Generator, number: int, train: dict[str, list[int]], away: str | None) -> dict[str, Any]:
    work = {
        name: {
            "loss": 1.6 / number**0.5 + float(rng.normal(0, 0.03)),
            "seconds": sum(counts) / 200 + float(rng.uniform(0, 0.4)),
            "examples": sum(counts),
            "sent": 9_100_400,
            "received": 9_100_000,
        }
        for name, counts in train.items()
        if name != away
    }
    missing = {away: "its update contains NaN"} if away else {}
    slowest = max(each["seconds"] for each in work.values())
    return {
        "event": "round",
        "round": number,
        "seconds": slowest + 0.4,
        "lr": 0.01,
        "sites": work,
        "missing": missing,
    }


def evaluation(number: int, view: str, site: str, confusion: np.ndarray, loss: float) -> dict[str, Any]:
    head = {"event": "evaluation", "round": number, "part": "valid", "view": view, "site": site}
    return {**head, "n": int(confusion.sum()), **scores(confusion, loss)}


def final_events(
    rng: np.random.Generator, sites: list[dict[str, Any]], chosen: dict[str, Any], skill: float
) -> Iterator[dict[str, Any]]:
    head = {"event": "final", "part": "test", **chosen}
    matrices = [matrix(rng, site["test"], skill) for site in sites]
    scored = [scores(each, 0.7) for each in matrices]
    for site, each in zip(sites, scored):
        yield {**head, "scope": "site", "site": site["name"], **each, "extra": {}}
    values = [each["metrics"]["balanced_accuracy"] for each in scored]
    extra = {"worst_site": min(values), "spread": float(np.std(values))}
    metrics = {name: float(np.mean([each["metrics"][name] for each in scored])) for name in scored[0]["metrics"]}
    yield {
        **head,
        "scope": "mean",
        "site": None,
        "metrics": metrics,
        "recall": [],
        "confusion": None,
        "extra": extra,
    }
    pooled = scores(np.sum(matrices, axis=0), 0.7)
    pooled["metrics"]["balanced_auc"] = None
    yield {**head, "scope": "pooled", "site": None, **pooled, "extra": {}}


def write_run(
    folder: Path,
    method: str = "fedavg",
    view: str = "global",
    *,
    train: dict[str, list[int]] = TRAIN,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Path:
    """A finished run folder."""
    folder.mkdir(parents=True)
    config = f'rounds = {rounds}\nseed = {seed}\n\n[method]\nname = "{method}"\n\n[training]\nbatch_size = 32\n'
    (folder / "config.toml").write_text(config)
    lines = [json.dumps(event) + "\n" for event in run_events(method, view, train, rounds, seed)]
    (folder / "events.jsonl").write_text("".join(lines))
    return folder
