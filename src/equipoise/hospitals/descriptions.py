"""What a server knows of a site's data: class names, image size and numbers of images, never an image."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from equipoise.core.errors import UserError
from equipoise.core.table import Table
from equipoise.core.validation import validated
from equipoise.data.federation import Federation, Site, Split
from equipoise.data.soundness import missing_training
from equipoise.data.splits import PARTS
from equipoise.data.store import Store, Task
from equipoise.engine.checkpoint import fingerprint
from equipoise.hospitals.parcels import digest_of
from equipoise.tasks import get_task

#: a site that says it has more images than this, over all parts and places, is not believed
MOST_IMAGES = 10_000_000
#: confusion matrices hold the square of this
MOST_CLASSES = 1_000
MOST_PLACES = 100
MOST_WARNINGS = 100
#: images at a time, where a digest goes through a description
STRETCH = 1 << 16

Counts = dict[str, list[NonNegativeInt]]
LONGEST_TEXT = 500
ShortText = Annotated[str, Field(max_length=LONGEST_TEXT)]


class Description(Table):
    """What a site says of its data, checked before the server builds on it."""

    site: ShortText
    classes: list[ShortText] = Field(min_length=2, max_length=MOST_CLASSES)
    image_size: PositiveInt = Field(le=1 << 14)
    channels: PositiveInt = Field(le=64)
    counts: Counts
    common: dict[ShortText, Counts] = Field(max_length=MOST_PLACES)
    cohorts: dict[ShortText, Counts] = Field(max_length=MOST_PLACES)
    warnings: list[ShortText] = Field(max_length=MOST_WARNINGS)
    fingerprint: ShortText
    task: Literal["classification", "segmentation"] = "classification"

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        told = 0
        for counts in (self.counts, *self.common.values(), *self.cohorts.values()):
            for part, numbers in counts.items():
                told += sum(numbers)
                most = MOST_IMAGES * pixels_of(self.task, self.image_size)
                if part not in PARTS or len(numbers) != len(self.classes) or told > most:
                    raise ValueError(f"the numbers of images in '{part[:LONGEST_TEXT]}' cannot be right")
        return self


def read_description(site: str, raw: Any) -> dict[str, Any]:
    """What a site said of its data, as a table that can be relied on."""
    # The task is left out where it is the usual one: so that digests of older descriptions stay the same.
    return validated(Description, raw, f"what {site} says of its data").model_dump(exclude_defaults=True)


def pixels_of(task: str, image_size: int) -> int:
    """What an image adds to the numbers of classes: 1, or its pixels where each has a class."""
    return image_size**2 if get_task(task).dense else 1


def _of(description: Mapping[str, Any]) -> tuple[str, int]:
    """The task of a description, and what an image adds to its numbers."""
    task = description.get("task", "classification")
    return task, pixels_of(task, description["image_size"])


class ElsewhereStore(Store):
    """Stands for images that lie in a hospital: they can be counted, not read."""

    readable = False

    def __init__(self) -> None:
        super().__init__(Path())

    def images(self, rows: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Refuse: the images never leave the hospital."""
        raise RuntimeError("these images lie at a site and cannot be read here")


class ElsewhereSplit(Split):
    """So many images of each class, in the order of the classes; large numbers take no memory.

    Args:
        pixels: what an image adds to the counts; more than 1 where each pixel has a class
    """

    def __init__(self, counts: Sequence[int], pixels: int = 1):
        object.__setattr__(self, "store", ElsewhereStore())
        object.__setattr__(self, "counts", np.asarray(counts, dtype=np.int64))
        object.__setattr__(self, "pixels", pixels)

    counts: np.ndarray
    pixels: int

    @property
    def task(self) -> Task:
        """What is learned of the images."""
        return "segmentation" if self.pixels > 1 else "classification"

    def __len__(self) -> int:
        return round(int(self.counts.sum()) / self.pixels)  # pixels of rare classes may be held back

    def __getattr__(self, name: str) -> Any:
        if name == "rows":
            return np.arange(len(self))
        if name == "labels":
            if self.pixels > 1:
                return np.zeros(len(self), dtype=np.int64)
            return np.repeat(np.arange(len(self.counts)), self.counts)
        raise AttributeError(name)

    def class_counts(self, num_classes: int) -> np.ndarray:
        """Images of each class: int64 (num_classes,)."""
        return np.pad(self.counts, (0, num_classes - len(self.counts)))

    def stretches(self) -> Iterator[np.ndarray]:
        """All rows, then all labels, in stretches that fit into memory."""
        for first in range(0, len(self), STRETCH):
            yield np.arange(first, min(first + STRETCH, len(self)))
        for label, count in enumerate(self.counts.tolist()):
            for first in range(0, count, STRETCH):
                yield np.full(min(STRETCH, count - first), label)

    def sample_digest(self) -> bytes:
        """Nothing: the site's description has a separate fingerprint."""
        return b""


def describe(name: str, federation: Federation, least: int = 0) -> dict[str, Any]:
    """A site's data in numbers; places that belong to no site (a common test set, cohorts) are listed separately.

    Args:
        least: fewer images of a class than this count as none, and warnings about so few stay at the site
    """
    own = {site.name: site for site in federation.sites}
    if name not in own:
        raise UserError(f"the data of {federation.name} has no site '{name}'; its sites: {', '.join(own)}")
    size = len(federation.classes)
    return {
        "site": name,
        "classes": list(federation.classes),
        "image_size": federation.image_size,
        "channels": federation.channels,
        "counts": _counts(own[name], size, least),
        "common": {federation.common.name: _counts(federation.common, size, least)} if federation.common else {},
        "cohorts": {cohort.name: _counts(cohort, size, least) for cohort in federation.cohorts},
        "warnings": [
            textwrap.shorten(text, LONGEST_TEXT, placeholder=" ...")
            for text in federation.warnings[:MOST_WARNINGS]
            if not _of_few(text, least)
        ],
        "fingerprint": fingerprint(replace(federation, sites=(own[name],))),
        **({} if federation.task == "classification" else {"task": federation.task}),
    }


def _counts(site: Site, size: int, least: int) -> dict[str, list[int]]:
    counts = {part: site.class_counts(size, part) * site.tells(part, size, least) for part in PARTS}
    return {part: np.where(own < least, 0, own).tolist() for part, own in counts.items()}


def _of_few(text: str, least: int) -> bool:
    """Whether a sentence has a number that may be one of few images."""
    return any(0 < int(number) < least for number in re.findall(r"\b\d+\b", text))


def agreed_federation(name: str, descriptions: Sequence[Mapping[str, Any]]) -> Federation:
    """The federation that some descriptions make, in their order; sites must agree on classes and image size."""
    first = descriptions[0]
    task, pixels = _of(first)
    for other in descriptions[1:]:
        if _of(other)[0] != task:
            raise UserError(
                f"{first['site']} has data for {task} and {other['site']} for {_of(other)[0]}; leave one of them out"
            )
        for key in ("classes", "image_size", "channels"):
            if other[key] != first[key]:
                raise UserError(
                    f"sites disagree about {key}: {first['site']} has {first[key]}, {other['site']} has {other[key]}; "
                    "agree on data.classes and data.size, and prepare the data again"
                )
    common, cohorts = _agreed_places(descriptions, "common"), _agreed_places(descriptions, "cohorts")
    federation = Federation(
        name=name,
        classes=tuple(first["classes"]),
        sites=tuple(_site(d["site"], d["counts"], pixels) for d in descriptions),
        image_size=int(first["image_size"]),
        channels=int(first["channels"]),
        common=next((_site(place, counts, pixels) for place, counts in common.items()), None),
        task=task,  # type: ignore[arg-type]
        cohorts=tuple(_site(place, counts, pixels) for place, counts in cohorts.items()),
    )
    told = (f"{d['site']}: {text}" for d in descriptions for text in d["warnings"])
    return replace(federation, warnings=(*missing_training(federation), *told))


def _agreed_places(descriptions: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Places that are no site, with their counts; sites that hold the same place must hold the same images."""
    names, found = {d["site"] for d in descriptions}, dict[str, Any]()
    for description in descriptions:
        for place, counts in description[kind].items():
            if place in names:
                raise UserError(f"{description['site']} holds a test set called '{place}', which is a site's name")
            if found.setdefault(place, counts) != counts:
                raise UserError(f"{description['site']} holds other images of '{place}' than the sites before it")
    return found


def training_images(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many training images each site says it has."""
    return {d["site"]: round(sum(d["counts"].get("train", ())) / _of(d)[1]) for d in descriptions}


def digests(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Identifies what each site said of its data."""
    return {d["site"]: digest_of(d) for d in descriptions}


def hosts(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Which sites hold the images of each place that is no site."""
    found: dict[str, list[str]] = {}
    for description in descriptions:
        for place in (*description["common"], *description["cohorts"]):
            found.setdefault(place, []).append(description["site"])
    return {place: tuple(sites) for place, sites in found.items()}


def described_counts(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, Counts]:
    """The images of each class that each site, and each place that is no site, has by part."""
    found: dict[str, Counts] = {d["site"]: d["counts"] for d in descriptions}
    for description in descriptions:
        found |= {**description["common"], **description["cohorts"]}
    return found


def _site(name: str, counts: Mapping[str, Sequence[int]], pixels: int) -> Site:
    return Site(name, {part: ElsewhereSplit(numbers, pixels) for part, numbers in counts.items()})
