"""Overlap and surface distances of each patient's volume, kept as `volumes.npz` in the run's folder.

A row is one model on one patient's slices of a part. Names of patients are hashes, as in `image_scores`. Between
hospitals there is no such file: numbers of single patients stay at their site.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from equipoise.data.federation import Federation
from equipoise.engine.image_scores import ModelAtPlace, hashed_names, read_columns, stacked, write_columns
from equipoise.engine.slot import Outcome, Request
from equipoise.mask_metrics import CASE
from equipoise.tasks.segmentation import volumes_of

if TYPE_CHECKING:
    import pandas as pd

VOLUMES = "volumes.npz"


@dataclass(frozen=True)
class VolumeScores(ModelAtPlace):
    """A model's numbers (V, 4, C) for the volumes of some images."""

    cases: np.ndarray


def volumes_in(number: int, answers: Sequence[tuple[Request, Outcome]]) -> Iterator[VolumeScores]:
    """The numbers of single volumes among the answers to requests."""
    for request, outcome in answers:
        for key, counts in outcome.measures.items():
            if "cases" in counts:
                view, _, part = key.partition(".")
                place = request.data or request.site
                yield VolumeScores(number, view, request.site, place, part, counts["cases"].numpy())


def write_volume_scores(path: Path, scores: Sequence[VolumeScores], federation: Federation) -> None:
    """Write the numbers of all models whole or not at all; nothing where there are none."""

    def own(score: VolumeScores) -> dict[str, np.ndarray]:
        split = score.split(federation)
        volumes, groups = volumes_of(split), hashed_names(split)[1]
        plain = {
            "group": np.array([groups[rows[0]] for rows in volumes]),
            "slices": np.array([len(rows) for rows in volumes]),
        }
        return plain | {name: score.cases[:, place] for place, name in enumerate(CASE)}

    if scores:
        write_columns(path, federation.classes, stacked(scores, own))


def read_volume_scores(path: Path) -> pd.DataFrame:
    """One row per model, volume and structure: Dice, IoU and distances; NaN where the structure is not to be seen."""
    import pandas as pd  # a run that only writes them need not wait for it

    columns = read_columns(path)
    classes = columns.pop("classes").tolist()
    tables = [
        pd.DataFrame(
            {name: values for name, values in columns.items() if values.ndim == 1}
            | {"structure": structure}
            | {name: values[:, place] for name, values in columns.items() if values.ndim > 1}
        )
        for place, structure in enumerate(classes)
        if place
    ]
    return pd.concat(tables, ignore_index=True)
