"""What the reported models predict for each validation and test image, kept as `predictions.npz` in the run's folder.

Names of files may name patients, so a name is a hash. Its key comes from the images themselves. Runs on the same images
have the same hashes, and a reader without the images cannot try names out. Between hospitals each site writes the file
for its own images, on its own disk: predictions of single images stay there.

Further columns of the data set, such as age and sex, are kept for sub-groups: numbers in bands, and no value that
identifies an image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.storage import replacing
from equipoise.data.federation import Federation, Split
from equipoise.data.store import Store
from equipoise.engine.payload_files import arrays_in

FILE = "predictions.npz"
#: columns of plain values, one entry per image and model
COLUMNS = ("split", "view", "site", "place", "round", "image", "group", "label")
#: what earlier versions did not write
PREDICTION = "prediction"
#: before the title of a column that the data set has of its images
EXTRA = "extra:"
#: a column has at most so many different values, and at least so many images of each on average
MOST_VALUES, LEAST_IMAGES = 100, 5
#: numbers with more values than this are put in bands of this width
BAND = 10
UNKNOWN = "unknown"
#: in place of the split: test images of a place that took no part
COHORT = "cohort"


@dataclass(frozen=True)
class ModelAtPlace:
    """One model, and the part of the images of a place that it was measured on.

    Args:
        site: whose model it is, or where the global one was measured
        place: whose images they are: the site's own, the common set's or a cohort's
    """

    round: int
    view: str
    site: str
    place: str
    part: str

    def split(self, federation: Federation) -> Split:
        """The images; those of a cohort are its test images."""
        place = next(place for place in federation.places() if place.name == self.place)
        return place.splits["test" if self.part == COHORT else self.part]


@dataclass(frozen=True)
class ImageScores(ModelAtPlace):
    """A model's probabilities (n, C) for some images, their labels and its predictions (n,)."""

    labels: np.ndarray
    probabilities: np.ndarray
    predictions: np.ndarray


@dataclass(frozen=True)
class Predictions:
    """The predictions of a run's models for single images.

    Args:
        columns: (n,) those of COLUMNS and `prediction`, and `probabilities` (n, C)
        extra: (n,) what else is known of each image, by title
    """

    classes: tuple[str, ...]
    columns: dict[str, np.ndarray]
    extra: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["label"])

    def where(self, chosen: np.ndarray) -> Predictions:
        """The predictions at some positions, or where a mask (n,) is true."""
        kept = {name: values[chosen] for name, values in self.columns.items()}
        return Predictions(self.classes, kept, {name: values[chosen] for name, values in self.extra.items()})


def stacked(scores: Sequence[Any], own: Callable[[Any], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Columns (n,) that tell model and place of each row, beside those that `own` makes of each scores."""
    tables: list[dict[str, np.ndarray]] = []
    for score in scores:
        columns = own(score)
        plain = {"split": score.part, "view": score.view, "site": score.site, "place": score.place}
        rows = len(columns["group"])
        tables.append(
            {name: np.full(rows, value) for name, value in {**plain, "round": score.round}.items()} | dict(columns)
        )
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def write_columns(path: Path, classes: Sequence[str], columns: Mapping[str, np.ndarray]) -> None:
    """Write columns whole or not at all."""
    named: dict[str, Any] = dict(columns)
    with replacing(path, durable=False) as draft, draft.open("wb") as file:
        np.savez_compressed(file, classes=np.array(classes), **named)


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """All columns of a file, and `classes`."""
    with arrays_in(path, "delete it; the run's scores stand in its log") as file:
        return dict(file)


def predictions_of(scores: Sequence[ImageScores], federation: Federation) -> Predictions:
    """The predictions of all models as columns, with hashes for names."""
    stores = [split.store for place in federation.places() for split in place.splits.values()]
    titles = dict.fromkeys(title for store in stores for title in sub_groups(store))

    def own(score: ImageScores) -> dict[str, np.ndarray]:
        split = score.split(federation)
        measured = np.isin(split.labels, score.labels)  # privacy.least may leave out all images of a class
        image, group = (names[measured] for names in hashed_names(split))
        at, told = _hashes(split.store)[2][split.rows[measured]], sub_groups(split.store)
        extra = {f"{EXTRA}{title}": told[title][at] if title in told else np.full(len(at), UNKNOWN) for title in titles}
        return {
            "image": image,
            "group": group,
            "label": score.labels.astype(np.int64),
            PREDICTION: score.predictions.astype(np.int64),
            "probabilities": score.probabilities.astype(np.float32),
        } | extra

    return _predictions(federation.classes, stacked(scores, own))


def _predictions(classes: Sequence[str], columns: Mapping[str, np.ndarray]) -> Predictions:
    """Columns, with those that the data set has of its images apart."""
    plain = {name: column for name, column in columns.items() if not name.startswith(EXTRA)}
    extra = {name.removeprefix(EXTRA): column for name, column in columns.items() if name not in plain}
    return Predictions(tuple(map(str, classes)), plain, extra)


def write_image_scores(path: Path, scores: Sequence[ImageScores], federation: Federation) -> None:
    """Write the predictions of all models whole or not at all; nothing where there are none."""
    if scores:
        found = predictions_of(scores, federation)
        extra = {f"{EXTRA}{title}": column for title, column in found.extra.items()}
        write_columns(path, found.classes, found.columns | extra)


def read_image_scores(path: Path) -> Predictions:
    """The predictions in a file."""
    columns = read_columns(path)
    classes = columns.pop("classes")
    return _predictions(classes.tolist(), {PREDICTION: columns["probabilities"].argmax(1)} | columns)


@cache
def sub_groups(store: Store) -> dict[str, np.ndarray]:
    """The columns (n,) of a store by which images fall into sub-groups, by title, in the order of its index.

    Many different numbers are put in bands. A column that would single images out, such as one of names, is left out.
    """
    found = {}
    for title, values in store.index.extra.items():
        known = banded(values)
        if 1 < len(np.unique(known)) <= min(MOST_VALUES, len(known) // LEAST_IMAGES):
            found[title] = known
    return found


def banded(values: Sequence[str]) -> np.ndarray:
    """Values as text; where all known ones are numbers, and they are many, as bands such as 40-49."""
    texts = [text.strip() for text in values]
    numbers = [_number(text) for text in texts]
    known = [number for text, number in zip(texts, numbers) if text and text.lower() not in ("nan", UNKNOWN)]
    if None in known or len(set(known)) <= BAND:
        return np.array([text or UNKNOWN for text in texts])
    bands = [None if number is None else int(number // BAND) * BAND for number in numbers]
    return np.array([UNKNOWN if low is None else f"{low}-{low + BAND - 1}" for low in bands])


def _number(text: str) -> float | None:
    """The number of a text; DICOM writes an age of 45 years as 045Y."""
    try:
        number = float(text[:-1] if text[-1:] == "Y" else text)
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def groups_of(columns: dict[str, np.ndarray], *names: str) -> Iterator[tuple[tuple[Any, ...], np.ndarray]]:
    """The distinct values of some columns, in the order in which they come, each with its rows."""
    keys = [*zip(*(columns[name].tolist() for name in names))]
    for key in dict.fromkeys(keys):
        yield key, np.array([position for position, other in enumerate(keys) if other == key])


def hashed_names(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """The hashes (n,) of the names and of the groups of a split's images, as 16 hexadecimal digits."""
    images, groups, positions = _hashes(split.store.pictures)
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
