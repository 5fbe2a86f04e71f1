"""Results of a run as pandas tables, one row per model and set of images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from equipoise.engine.image_scores import groups_of
from equipoise.report.record import RunRecord
from equipoise.tasks.classification import Classification

#: the number that logarithms of probabilities do not go below
SMALLEST = 1e-38


def scores(run: RunRecord) -> pd.DataFrame:
    """The results of a run: each view at each site, as the mean over sites, pooled, and on cohorts."""
    rows = [
        {
            "view": result.view, "scope": result.scope, "site": result.site, "split": result.part,
            "round": result.round, **result.metrics, **_recalls(run.start.classes, result.recall),
        }
        for result in run.results
    ]  # fmt: skip
    return _frame(rows, ["view", "scope", "site", "split", "round"])


def evaluations(run: RunRecord) -> pd.DataFrame:
    """Every score of every round, site, view and split."""
    rows = [
        {"round": e.round, "split": e.part, "view": e.view, "site": e.site, "n": e.n, **e.metrics}
        for e in run.evaluations
    ]
    return _frame(rows, ["round", "split", "view", "site", "n"])


def training(run: RunRecord) -> pd.DataFrame:
    """The local training of every round and site: loss, seconds, images seen, bytes sent and received."""
    rows = [
        {"round": one.round, "lr": one.lr, "site": site, **facts.model_dump()}
        for one in run.rounds
        for site, facts in one.sites.items()
    ]
    return _frame(rows, ["round", "lr", "site"])


def predictions(classes: Sequence[str], columns: dict[str, np.ndarray]) -> pd.DataFrame:
    """One row per model and image: its label, the model's prediction and the probability of each class."""
    plain = {name: values for name, values in columns.items() if name not in ("probabilities", "label")}
    names = np.array(classes)
    frame = pd.DataFrame(
        {**plain, "label": names[columns["label"]], "prediction": names[columns["probabilities"].argmax(1)]}
    )
    return pd.concat([frame, probabilities(classes, columns["probabilities"])], axis=1)


def probabilities(classes: Sequence[str], values: np.ndarray) -> pd.DataFrame:
    """Probabilities (n, C) as columns `p(class)`."""
    return pd.DataFrame(values, columns=[f"p({name})" for name in classes])


def measured(classes: Sequence[str], columns: dict[str, np.ndarray]) -> pd.DataFrame:
    """The scores of predictions: each model on each place's images, and each view on the images of all sites."""
    task = Classification(classes)
    rows = []
    for (split, view, site, place), chosen in groups_of(columns, "split", "view", "site", "place"):
        summary = _summary(task, columns, chosen)
        rows.append({"view": view, "scope": "site", "site": site, "place": place, "split": split} | summary)
    for (split, view), chosen in groups_of(columns, "split", "view"):
        summary = _summary(task, columns, chosen)
        rows.append({"view": view, "scope": "pooled", "site": None, "place": None, "split": split} | summary)
    return _frame(rows, ["view", "scope", "site", "place", "split", "n"])


def _summary(task: Classification, columns: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, Any]:
    """The metrics and recalls of some predictions."""
    logits = torch.from_numpy(columns["probabilities"][rows]).clamp_min(SMALLEST).log()
    summary = task.summary(task.measure(logits, torch.from_numpy(columns["label"][rows])))
    return {"n": summary["n"], **summary["metrics"], **_recalls(task.classes, summary["recall"])}


def _recalls(classes: Sequence[str], recall: Iterable[float | None]) -> dict[str, float | None]:
    return {f"recall({name})": value for name, value in zip(classes, recall)}


def _frame(rows: Sequence[dict[str, Any]], first: Sequence[str]) -> pd.DataFrame:
    """Rows as a table whose first columns are there even without rows; what is not known of numbers is NaN."""
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=[*first])
    numbers = [name for name in frame.columns if name not in ("view", "scope", "site", "place", "split")]
    return frame.astype({name: float for name in numbers if frame[name].dtype == object})
