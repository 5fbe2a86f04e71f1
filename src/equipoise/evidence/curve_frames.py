"""The points of ROC, precision-recall, reliability and decision curves of a run, as frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from equipoise.core.errors import UserError
from equipoise.engine.image_scores import Predictions
from equipoise.evidence.recomputed import models, sub_groups
from equipoise.thresholds import Curve, net_benefit, precision_recall, reliability, roc, scaled, temperature, treat_all

KINDS = ("roc", "precision-recall", "reliability", "net-benefit")
OF_CLASSES = {"roc": roc, "precision-recall": precision_recall, "net-benefit": net_benefit}


def curve_frame(predictions: Predictions, kind: str, split: str = "test") -> pd.DataFrame:
    """The points of a kind of curve, a line each: view, site (empty: all images), class, x, y.

    Of several rounds, the last one's models are shown.
    """
    if kind not in KINDS:
        raise UserError(f"there are no curves {kind!r}; there are {', '.join(KINDS)}")
    lines: list[pd.DataFrame] = []
    temperatures = _temperatures(predictions)
    chosen = predictions.where(predictions.columns["split"] == split)
    for where, rows in sub_groups(chosen, ("view",)):
        own = [(site, rounds[-1]) for (site, _), rounds in models(chosen.where(rows))]
        pooled = {name: np.concatenate([one.columns[name] for _, one in own]) for name in ("label", "probabilities")}
        every = [*((site, one.columns) for site, one in own), *([("", pooled)] if len(own) > 1 else [])]
        for site, columns in every:
            if kind == "reliability":
                found = [*_reliable(columns, temperatures.get((where["view"], site)))]
            else:
                found = [*_of_classes(kind, predictions.classes, columns)]
            lines += [pd.DataFrame({"view": where["view"], "site": site, **told}) for told in found]
    return pd.concat(lines, ignore_index=True) if lines else pd.DataFrame(columns=["view", "site", "x", "y"])


def _of_classes(kind: str, classes: tuple[str, ...], columns: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    labels, probabilities = columns["label"], columns["probabilities"].astype(np.float64)
    for number, name in enumerate(classes):
        positive = labels == number
        if positive.all() or not positive.any():
            continue
        curve: Curve = OF_CLASSES[kind](positive, probabilities[:, number])
        told = {"class": name, "x": curve.x, "y": curve.y, "threshold": curve.threshold}
        yield told | ({"treat_all": treat_all(positive)} if kind == "net-benefit" else {})


def _reliable(columns: Mapping[str, np.ndarray], by: float | None) -> Iterator[dict[str, Any]]:
    labels, probabilities = columns["label"], columns["probabilities"].astype(np.float64)
    ways = {"as it is": probabilities} | ({} if by is None else {"scaled": scaled(probabilities, by)})
    for name, values in ways.items():
        confidence, accuracy, count = reliability(labels, values)
        yield {"scaling": name, "temperature": 1.0 if name == "as it is" else by, "x": confidence, "y": accuracy,
               "n": count}  # fmt: skip


def _temperatures(predictions: Predictions) -> dict[tuple[str, str], float]:
    """The temperature of each view at each site, fitted on its validation images."""
    valid = predictions.where(predictions.columns["split"] == "valid")
    found = {}
    for where, rows in sub_groups(valid, ("view",)):
        for (site, _), rounds in models(valid.where(rows)):
            columns = rounds[-1].columns
            found[where["view"], site] = temperature(columns["label"], columns["probabilities"])
    return found
