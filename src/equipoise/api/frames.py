"""Results of a run as pandas tables, one row per model and set of images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from equipoise.engine.image_scores import COHORT, COLUMNS, PREDICTION, Predictions
from equipoise.evidence.recomputed import Scored, scores_of
from equipoise.report.record import RunRecord

#: what a record's frame holds besides scores that users read
UNTOLD = ("rule", "rounds", "offset", "confusion", "recall", "spread")


def scores(run: RunRecord) -> pd.DataFrame:
    """The results of a run: each view at each site, as the mean over sites, pooled, and on cohorts."""
    return _told(run, run.results, ["view", "scope", "site", "split", "round"])


def evaluations(run: RunRecord) -> pd.DataFrame:
    """Every score of every round, site, view and split."""
    found = run.evaluations.astype(dict.fromkeys(["part", "view", "site"], "str")).drop(columns="scope")
    found["recall"] = [line.get("recall") for line in run.lines(found["offset"])]
    return _told(run, found, ["round", "split", "view", "site", "n"])


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
    told = run.work.astype({"site": "str"})
    told.insert(1, "lr", told["round"].map(run.rounds["lr"]))
    return told


def predictions(found: Predictions) -> pd.DataFrame:
    """One row per model and image: its label, the model's prediction, the probability of each class, and what else is
    known of the image."""
    names, columns = np.array(found.classes), found.columns
    plain = {name: columns[name] for name in COLUMNS if name != "label"}
    frame = pd.DataFrame({**plain, "label": names[columns["label"]], "prediction": names[columns[PREDICTION]]})
    others = pd.DataFrame({title: own for title, own in found.extra.items() if title not in frame})
    return pd.concat([frame, probabilities(found.classes, columns["probabilities"]), others], axis=1)


def probabilities(classes: Sequence[str], values: np.ndarray) -> pd.DataFrame:
    """Probabilities (n, C) as columns `p(class)`."""
    return pd.DataFrame(values, columns=[f"p({name})" for name in classes])


def measured(predictions: Predictions, by: Sequence[str] = (), intervals: Sequence[str] = ()) -> pd.DataFrame:
    """The scores of predictions: each model on each place's images, their mean over sites, and pooled.

    Args:
        by: columns of the images whose values make sub-groups
        intervals: metrics whose intervals stand beside them, as `low(metric)` and `high(metric)`
    """
    rows = [_row(predictions.classes, scored) for scored in scores_of(predictions, by, intervals)]
    return _frame(rows, ["view", "scope", "site", "place", "split", *by, "n"])


def with_intervals(told: pd.DataFrame, predictions: Predictions, metrics: Sequence[str]) -> pd.DataFrame:
    """A run's scores with the bounds of their intervals, where its predictions give any."""
    found = measured(predictions, intervals=metrics)
    of_cohort = found["split"] == COHORT
    found = found[~of_cohort | (found["scope"] == "site")].copy()
    found.loc[of_cohort, ["scope", "split"]] = COHORT, "test"
    found["site"] = found["place"].where(found["scope"] == COHORT, found["site"].where(found["scope"] == "site", ""))
    bounds = [f"{end}({metric})" for metric in metrics for end in ("low", "high")]
    keys = ["view", "scope", "site", "split"]
    known = told.assign(site=told["site"].fillna("") if "site" in told else "", split=told.get("split", "test"))
    merged = known.merge(found[[*keys, *bounds]].drop_duplicates(keys), on=keys, how="left")
    return pd.concat([told, merged[bounds].set_axis(told.index)], axis=1)


def _row(classes: Sequence[str], scored: Scored) -> dict[str, Any]:
    plain = {name: getattr(scored, name) for name in ("view", "scope", "site", "place", "split")}
    bounds = {
        f"{end}({metric})": getattr(found, end) for metric, found in scored.intervals.items() for end in ("low", "high")
    }
    summary = scored.summary
    numbers = {"n": summary["n"], **summary["metrics"], **_recalls(classes, summary["recall"])}
    return {**plain, **scored.by, **numbers, **bounds}


def _recalls(classes: Sequence[str], recall: Iterable[float | None]) -> dict[str, float | None]:
    return {f"recall({name})": value for name, value in zip(classes, recall)}


def _frame(rows: Sequence[dict[str, Any]], first: Sequence[str]) -> pd.DataFrame:
    """Rows as a table whose first columns are there even without rows; what is not known of numbers is NaN."""
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=[*first])
    numbers = [name for name in frame.columns if name not in first or name == "n"]
    return frame.astype({name: float for name in numbers if frame[name].dtype == object})


def attacks(found: Mapping[str, Any]) -> pd.DataFrame:
    """What an audit found: a row for all images, each class and each site, with 95 % intervals."""
    rows = []
    for group in found["groups"]:
        row = {key: group[key] for key in ("scope", "name", "members", "others")}
        for key in ("auc", "found"):
            row |= dict(zip((key, f"{key}_low", f"{key}_high"), group[key]))
        rows.append(row)
    return pd.DataFrame(rows)
