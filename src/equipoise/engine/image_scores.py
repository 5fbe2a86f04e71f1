"""What the reported models predict for each validation and test image, kept as `predictions.npz` in the run's folder.

Names of files may name patients, so a name is a hash. Its key comes from the images themselves. Runs on the same images
have the same hashes, and a reader without the images cannot try names out. Between hospitals there is no such file:
predictions of single images stay at their site.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.storage import replacing
from equipoise.data.federation import Federation, Split
from equipoise.data.store import Store

FILE = "predictions.npz"
#: columns of plain values, one entry per image and model
COLUMNS = ("split", "view", "site", "place", "round", "image", "group", "label")


@dataclass(frozen=True)
class ImageScores:
    """One model's probabilities (n, C) for one part of the images of a place, and their labels (n,).

    Args:
        site: whose model it is, or where the global one was measured
        place: whose images they are: the site's own, the common set's or a cohort's
    """

    round: int
    view: str
    site: str
    place: str
    part: str
    labels: np.ndarray
    probabilities: np.ndarray


def write_image_scores(path: Path, scores: Sequence[ImageScores], federation: Federation) -> None:
    """Write the predictions of all models whole or not at all; nothing where there are none."""
    if not scores:
        return
    splits = {(place.name, part): split for place in federation.places() for part, split in place.splits.items()}
    columns: dict[str, list[np.ndarray]] = {name: [] for name in (*COLUMNS, "probabilities")}
    for score in scores:
        image, group = hashed_names(splits[score.place, score.part])
        plain = {"split": score.part, "view": score.view, "site": score.site, "place": score.place}
        for name, text in plain.items():
            columns[name].append(np.full(len(score.labels), text))
        columns["round"].append(np.full(len(score.labels), score.round))
        columns["image"].append(image)
        columns["group"].append(group)
        columns["label"].append(score.labels.astype(np.int64))
        columns["probabilities"].append(score.probabilities.astype(np.float32))
    joined: dict[str, Any] = {name: np.concatenate(values) for name, values in columns.items()}
    with replacing(path, durable=False) as draft, draft.open("wb") as file:
        np.savez_compressed(file, classes=np.array(federation.classes), **joined)


def read_image_scores(path: Path) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """The names of the classes, and the columns of a file of predictions with their `probabilities` (n, C)."""
    with np.load(path) as file:
        columns = {name: file[name] for name in (*COLUMNS, "probabilities")}
        return tuple(map(str, file["classes"])), columns


def groups_of(columns: dict[str, np.ndarray], *names: str) -> Iterator[tuple[tuple[Any, ...], np.ndarray]]:
    """The distinct values of some columns, in the order in which they come, each with its rows."""
    keys = [*zip(*(columns[name].tolist() for name in names))]
    for key in dict.fromkeys(keys):
        yield key, np.array([position for position, other in enumerate(keys) if other == key])


def hashed_names(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """The hashes (n,) of the names and of the groups of a split's images, as 16 hexadecimal digits."""
    images, groups, positions = _hashes(split.store)
    chosen = positions[split.rows]
    return images[chosen], groups[chosen]


@cache
def _hashes(store: Store) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hashes of a store's names and groups, and the position in its index by row of the packed file."""
    index = store.index
    key = hashlib.sha256(b"names of images" + store.sample_digest(index.rows)).digest()
    positions = np.zeros(int(index.rows.max()) + 1, dtype=np.int64)
    positions[index.rows] = np.arange(len(index))
    return _hashed(index.names, key, b"image"), _hashed(index.groups, key, b"group"), positions


def _hashed(names: Sequence[str], key: bytes, kind: bytes) -> np.ndarray:
    hashes = (hashlib.blake2b(name.encode(), digest_size=8, key=key, person=kind) for name in names)
    return np.array([found.hexdigest() for found in hashes])
