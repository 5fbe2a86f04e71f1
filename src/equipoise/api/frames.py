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


#: what a record's frame holds besides scores that users read
UNTOLD = ("rule", "rounds", "offset", "confusion", "recall", "spread")


def scores(run: RunRecord) -> pd.DataFrame:
    """The results of a run: each view at each site, as the mean over sites, pooled, and on cohorts."""
    return _told(run, run.results, ["view", "scope", "site", "split", "round"])


def evaluations(run: RunRecord) -> pd.DataFrame:
    """Every score of every round, site, view and split."""
    return _told(run, run.evaluations.drop(columns="scope", errors="ignore"), ["round", "split", "view", "site", "n"])


def _told(run: RunRecord, frame: pd.DataFrame, first: Sequence[str]) -> pd.DataFrame:
    """A record's scores as users read them: some columns first, then metrics and the recall of each class."""
    named = frame.rename(columns={"part": "split"})
    recalls = pd.DataFrame([_recalls(run.start.classes, found or ()) for found in frame["recall"]], index=frame.index)
    told = named.drop(columns=[name for name in UNTOLD if name in named])
    found = pd.concat(
        [told[[name for name in first if name in told]], told.drop(columns=first, errors="ignore"), recalls], axis=1
    )
    return found.dropna(axis="columns", how="all").reset_index(drop=True)


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
        rows.append({"view": view, "scope": "pooled", "site": "", "place": "", "split": split} | summary)
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
