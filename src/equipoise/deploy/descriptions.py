"""What a server knows of a site's data: class names, image size and numbers of images, never an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.data.federation import Federation, Site, Split
from equipoise.data.splits import PARTS
from equipoise.data.store import Store
from equipoise.errors import UserError


class ElsewhereStore(Store):
    """Stands for images that lie in a hospital: they can be counted, not read."""

    def __init__(self) -> None:
        super().__init__(Path())

    def images(self, rows: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Refuse: the images never leave the hospital."""
        raise RuntimeError("these images lie at a site and cannot be read here")


def describe(name: str, federation: Federation) -> dict[str, Any]:
    """A site's data in numbers; places that belong to no site (a common test set, cohorts) are told apart."""
    own = {site.name: site for site in federation.sites}
    if name not in own:
        raise UserError(f"the data of {federation.name} has no site '{name}'; its sites: {', '.join(own)}")
    size = len(federation.classes)
    return {
        "site": name,
        "classes": list(federation.classes),
        "image_size": federation.image_size,
        "channels": federation.channels,
        "counts": _counts(own[name], size),
        "common": {federation.common.name: _counts(federation.common, size)} if federation.common else {},
        "cohorts": {cohort.name: _counts(cohort, size) for cohort in federation.cohorts},
        "warnings": list(federation.warnings),
    }


def _counts(site: Site, size: int) -> dict[str, list[int]]:
    return {part: site.class_counts(size, part).tolist() for part in PARTS}


def agreed_federation(name: str, descriptions: Sequence[Mapping[str, Any]]) -> Federation:
    """The federation that some descriptions make, in their order; sites must agree on classes and image size."""
    first = descriptions[0]
    for other in descriptions[1:]:
        for key in ("classes", "image_size", "channels"):
            if other[key] != first[key]:
                raise UserError(
                    f"sites disagree about {key}: {first['site']} has {first[key]}, {other['site']} has {other[key]}; "
                    "agree on data.classes and data.size, and prepare the data again"
                )
    common = {place: counts for d in descriptions for place, counts in d["common"].items()}
    cohorts = {place: counts for d in descriptions for place, counts in d["cohorts"].items()}
    return Federation(
        name=name,
        classes=tuple(first["classes"]),
        sites=tuple(_site(d["site"], d["counts"]) for d in descriptions),
        image_size=int(first["image_size"]),
        channels=int(first["channels"]),
        common=next((_site(place, counts) for place, counts in common.items()), None),
        cohorts=tuple(_site(place, counts) for place, counts in cohorts.items()),
        warnings=tuple(dict.fromkeys(w for d in descriptions for w in d["warnings"])),
    )


def hosts(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Which sites hold the images of each place that is no site."""
    found: dict[str, list[str]] = {}
    for description in descriptions:
        for place in (*description["common"], *description["cohorts"]):
            found.setdefault(place, []).append(description["site"])
    return {place: tuple(sites) for place, sites in found.items()}


def _site(name: str, counts: Mapping[str, Sequence[int]]) -> Site:
    store, splits = ElsewhereStore(), {}
    for part, numbers in counts.items():
        labels = np.repeat(np.arange(len(numbers)), np.asarray(numbers, dtype=np.int64))
        splits[part] = Split(store, np.arange(len(labels)), labels)
    return Site(name, splits)
