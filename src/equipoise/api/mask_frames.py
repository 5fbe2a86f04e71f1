"""The scores of models for segmentation on the images of a federation, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from equipoise.core.errors import UserError
from equipoise.data.federation import Federation, Site, Split
from equipoise.engine.prediction import Predictor
from equipoise.tasks import Counts

#: images that a model sees at a time
BATCH = 32


def measured(
    models: Sequence[tuple[str | None, Predictor, Sequence[Site]]], federation: Federation, parts: Sequence[str]
) -> pd.DataFrame:
    """The scores of each model at each place, and of each view on the images of all places.

    Args:
        models: whose each is (None: the global one), the model, and the places where it is measured
        parts: which of train, valid and test
    """
    rows: list[dict[str, Any]] = []
    pools: dict[tuple[str, str], list[Counts]] = {}
    for owner, predictor, places in models:
        _refuse_others(predictor, federation)
        view = "global" if owner is None else "personal"
        for place in places:
            for part, images in place.splits.items():
                if part in parts:
                    counts = _counts(predictor, images)
                    pools.setdefault((view, part), []).append(counts)
                    whose = {"view": view, "scope": "site", "site": owner or place.name, "place": place.name}
                    rows.append({**whose, "split": part, **_told(predictor, counts)})
    if not rows:
        raise UserError(f"{federation.name} has no image in {' or '.join(parts)}; leave split out for all images")
    for (view, part), several in pools.items():
        pooled = {"view": view, "scope": "pooled", "site": "", "place": "", "split": part}
        rows.append({**pooled, **_told(models[0][1], models[0][1].task.merge(several))})
    return pd.DataFrame(rows)


def _refuse_others(predictor: Predictor, federation: Federation) -> None:
    if federation.task != predictor.task.name or federation.classes != predictor.classes:
        kind = "masks" if federation.task == predictor.task.name else "images"
        raise UserError(
            f"the run knows masks of {', '.join(predictor.classes)}, and {federation.name} has {kind} of "
            f"{', '.join(federation.classes)}; evaluate on data with the same structures in the same order"
        )


@torch.no_grad()
def _counts(predictor: Predictor, images: Split) -> Counts:
    seen: dict[str, list[torch.Tensor]] = {}
    for rows in torch.arange(len(images)).split(BATCH):
        pixels, masks = predictor.prepared(images.images(rows), images.masks(rows))
        for name, values in predictor.task.observe(predictor.logits_of(pixels), masks).items():
            seen.setdefault(name, []).append(values)
    return predictor.task.count({name: torch.cat(values) for name, values in seen.items()}, images)


def _told(predictor: Predictor, counts: Counts) -> dict[str, Any]:
    summary = predictor.task.summary(counts)
    dice = dict(zip(predictor.classes[1:], summary["by_class"]["dice"][1:]))
    return {"n": summary["n"], **summary["metrics"], **{f"dice({name})": value for name, value in dice.items()}}
