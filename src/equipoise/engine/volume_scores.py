"""Overlap and surface distances of each patient's volume, kept as `volumes.npz` in the run's folder.

A row is one model on one patient's slices of a part. Names of patients are hashes, as in `image_scores`. Between
hospitals there is no such file: numbers of single patients stay at their site.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.core.storage import replacing
from equipoise.data.federation import Federation
from equipoise.engine.image_scores import hashed_names
from equipoise.engine.payload_files import arrays_in
from equipoise.engine.slot import Outcome, Request
from equipoise.mask_metrics import CASE
from equipoise.tasks.segmentation import volumes_of

if TYPE_CHECKING:
    import pandas as pd

VOLUMES = "volumes.npz"
#: columns of plain values, one entry per volume and model
COLUMNS = ("split", "view", "site", "place", "round", "group", "slices")


@dataclass(frozen=True)
class VolumeScores:
    """One model's numbers (V, 4, C) for the volumes of one part of the images of a place.

    Args:
        site: whose model it is, or where the global one was measured
        place: whose images they are: the site's own, the common set's or a cohort's
    """

    round: int
    view: str
    site: str
    place: str
    part: str
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
    if not scores:
        return
    splits = {(place.name, part): split for place in federation.places() for part, split in place.splits.items()}
    columns: dict[str, list[np.ndarray]] = {name: [] for name in (*COLUMNS, *CASE)}
    for score in scores:
        split = splits[score.place, score.part]
        volumes, groups = volumes_of(split), hashed_names(split)[1]
        plain = {"split": score.part, "view": score.view, "site": score.site, "place": score.place}
        for name, value in {**plain, "round": score.round}.items():
            columns[name].append(np.full(len(volumes), value))
        columns["group"].append(np.array([groups[rows[0]] for rows in volumes]))
        columns["slices"].append(np.array([len(rows) for rows in volumes]))
        for place, name in enumerate(CASE):
            columns[name].append(score.cases[:, place])
    joined: dict[str, Any] = {name: np.concatenate(values) for name, values in columns.items()}
    with replacing(path, durable=False) as draft, draft.open("wb") as file:
        np.savez_compressed(file, classes=np.array(federation.classes), **joined)


def read_volume_scores(path: Path) -> pd.DataFrame:
    """One row per model, volume and structure: Dice, IoU and distances; NaN where the structure is not to be seen."""
    import pandas as pd  # a run that only writes them need not wait for it

    with arrays_in(path, "delete it; the run's scores stand in its log") as file:
        classes = [str(name) for name in file["classes"]]
        plain = {name: file[name] for name in COLUMNS}
        numbers = {name: file[name] for name in CASE}
    tables = [
        pd.DataFrame({**plain, "structure": structure, **{name: values[:, place] for name, values in numbers.items()}})
        for place, structure in enumerate(classes)
        if place
    ]
    return pd.concat(tables, ignore_index=True)
