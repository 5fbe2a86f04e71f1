"""Whether runs of a study saw the same images: settings may agree and files have changed meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from equipoise.data import DataConfig
from equipoise.methods import get_method
from equipoise.report.log_lines import Start

#: the place of images makes no difference to their content
PLACES = ("root", "store")
Owner = TypeVar("Owner")


@dataclass(frozen=True)
class DataSeen:
    """What a run tells of its data. Fingerprints are empty in runs of before they were written down."""

    asked: str
    """The settings of the data."""
    judged: str
    """Classes, and the numbers of validation and test images at each place."""
    judging_images: str
    """Fingerprint of validation and test images: no seed changes them, and pooled training has the same."""
    drawn: tuple[int, bool]
    """What the training images of sites depend on besides: the seed, and whether they are pooled."""
    images: str
    """Fingerprint of all images, training images site by site."""

    @classmethod
    def of(cls, start: Start) -> DataSeen:
        """By the event that started a run; a data setting that it did not know yet was at its default."""
        settings = DataConfig().model_dump(mode="json") | start.config["data"]
        asked = {key: value for key, value in settings.items() if key not in PLACES}
        judging = [(site.name, site.valid, site.test) for site in start.sites if any(site.valid) or any(site.test)]
        return cls(
            json.dumps(asked, sort_keys=True),
            json.dumps([start.classes, judging]),
            start.judging_data,
            (start.config["seed"], get_method(start.config.get("method", start.method)).pooled),
            start.data,
        )

    def conflicts(self, other: DataSeen) -> bool:
        """Whether the same settings led to other images."""
        if self.asked != other.asked:
            return False
        pairs = [(self.judging_images, other.judging_images)]
        if self.drawn == other.drawn:
            pairs.append((self.images, other.images))
        return self.judged != other.judged or any(all(pair) and pair[0] != pair[1] for pair in pairs)


def kinds(owners: Iterable[tuple[Owner, DataSeen]]) -> list[list[Owner]]:
    """Runs that saw the same images, together; a single list if no run's data conflict with another's."""
    found: list[tuple[list[Owner], set[DataSeen]]] = []
    for owner, seen in owners:
        kind = next((kind for kind in found if not any(seen.conflicts(other) for other in kind[1])), None)
        if kind is None:
            found.append(kind := ([], set()))
        kind[0].append(owner)
        kind[1].add(seen)
    return [own for own, _ in found]
