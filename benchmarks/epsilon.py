"""What differential privacy costs: accuracy against epsilon on frozen features, for FedAvg and for the closed form.

    python benchmarks/epsilon.py --out results/benchmarks [--runs FOLDER]

Data: PRR's dermoscopic sites, features of EfficientNet-Lite0. Validation images of the first seed choose each row's
setting for each epsilon. Scores are of test images, without the noise that epsilon puts on reported scores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.api import Result
from equipoise.data import load_federation
from equipoise.engine.loop import Run
from equipoise.engine.runs import make_config, with_encoder
from equipoise.methods import get_method
from equipoise.metrics import from_confusion
from equipoise.report import read_run

SEEDS = (1, 2, 3)
EPSILONS = (None, 8.0, 4.0, 2.0, 1.0)
METRICS = ("balanced_accuracy", "macro_f1")
DATA = (
    "data.name='dermoscopy-prr'",
    "data.size=224",
    "data.split='grouped'",
    "net.encoder='efficientnet-lite0'",
    "net.adapter='linear'",
)
PHANTOM = ("data.phantom.images=240", "data.phantom.sites=3", "data.phantom.size=16", "net.group_norm=true")
ONCE = ("evaluation.rule='last'", "evaluation.trained=false", "evaluation.every=10", "checkpoint.every=10")
TRAINED = ("train.rounds=10", "train.epochs=2", "train.batch_size=128", "train.loss='balanced_softmax'", *ONCE)
SECURE = ("privacy.secure_sums=true", "train.min_sites=4", "evaluation.view='global'", *ONCE)
#: rows: method, settings, the setting of epsilon, and the settings among which validation images choose
ROWS: dict[str, tuple[str, Sequence[str], str, Sequence[Sequence[str]]]] = {
    "FedAvg, balanced softmax": (
        "fedavg",
        TRAINED,
        "privacy.epsilon",
        [[f"train.optimiser.lr={rate}"] for rate in (0.02, 0.1, 0.5)],
    ),
    "closed form, principal directions": (
        "closed",
        SECURE,
        "closed.epsilon",
        [[f"closed.dimensions={size}"] for size in (64, 256)],
    ),
    "closed form, random directions": (
        "closed",
        (*SECURE, "closed.basis='random'"),
        "closed.epsilon",
        [[f"closed.dimensions={size}"] for size in (64, 256)],
    ),
}


def scores(folder: Path, method: str, settings: Sequence[str]) -> dict[str, dict[str, float]]:
    """Scores of a run's global model on all sites' validation and test images, in per cent. A finished run is kept."""
    if not (folder / "events.jsonl").exists() or not read_run(folder).finished:
        config = make_config(None, settings, method=method)
        config, federation = with_encoder(config, load_federation(config.data, config.seed))
        Run(config, get_method(method), federation, folder).execute(resume=folder.exists())
    if method == "closed":  # sums of counts over all sites, without noise of their own
        run = read_run(folder)
        valid = run.evaluations[run.evaluations["view"] == "global"].iloc[-1]
        test = run.finals[(run.finals["view"] == "global") & (run.finals["scope"] == "pooled")].iloc[0]
        told = {"valid": valid, "test": test}
        return {part: {metric: 100 * float(own[metric]) for metric in METRICS} for part, own in told.items()}
    table = Result(folder).predictions()
    table = table[(table["view"] == "global") & ~table["site"].str.startswith("vienna")]
    found = {}
    for part, own in table.groupby("split"):
        names = sorted(table["label"].unique())
        confusion = np.array([[((own.label == a) & (own.prediction == b)).sum() for b in names] for a in names])
        found[str(part)] = {metric: 100 * from_confusion(confusion)[metric] for metric in METRICS}
    return found


def row(title: str, data: Sequence[str], runs: Path, epsilons: Sequence[float | None], seeds: Sequence[int]) -> Any:
    """Mean and deviation over seeds of a row's test scores at each epsilon, with the setting that was chosen."""
    method, common, name, choices = ROWS[title]
    cells = []
    for epsilon in epsilons:
        settings = [*data, *common, *([f"{name}={epsilon}"] if epsilon else [])]
        place = runs / f"{title} {epsilon or 'none'}"
        tried = []
        for choice in choices:
            found = scores(place / f"{choice[0]}, seed {seeds[0]}", method, [*settings, *choice, f"seed={seeds[0]}"])
            tried.append((found["valid"][METRICS[0]], choice))
        chosen = max(tried, key=lambda one: one[0])[1]
        all_seeds = [
            scores(place / f"{chosen[0]}, seed {seed}", method, [*settings, *chosen, f"seed={seed}"])["test"]
            for seed in seeds
        ]
        cell: dict[str, Any] = {"epsilon": epsilon, "chosen": chosen}
        for metric in METRICS:
            values = [found[metric] for found in all_seeds]
            cell[metric] = {
                "mean": float(np.mean(values)),
                "sd": float(np.std(values, ddof=1)) if len(seeds) > 1 else 0,
            }
        cells.append(cell)
        print(title, cell, flush=True)
    return {"title": title, "cells": cells}


def main() -> None:
    """Run all rows, and write `epsilon.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the phantom, one round, one seed, to try the script")
    parser.add_argument("--runs", type=Path, help="keep the runs here, and go on with those that are there")
    parser.add_argument("--out", type=Path, help="write epsilon.json in this folder")
    asked = parser.parse_args()
    data, epsilons, seeds = DATA, EPSILONS, SEEDS
    if asked.quick:
        data, epsilons, seeds = (*PHANTOM, "train.rounds=1"), (None, 8.0), (1,)
        for title, (method, common, name, choices) in ROWS.items():
            fewer = [one for one in common if not one.startswith(("train.rounds", "train.min_sites", "train.batch"))]
            ROWS[title] = method, fewer, name, choices[:1]
    with tempfile.TemporaryDirectory(prefix="epsilon-") as scratch:
        runs = asked.runs or Path(scratch)
        told = {"epsilons": epsilons, "seeds": seeds, "rows": [row(name, data, runs, epsilons, seeds) for name in ROWS]}
    if asked.out:
        (asked.out / "epsilon.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
