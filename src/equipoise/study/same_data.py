"""Whether runs of a study saw the same images: settings may agree and files have changed meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from equipoise.engine.events import first_event
from equipoise.engine.loop import Run
from equipoise.engine.opening import class_counts
from equipoise.errors import UserError
from equipoise.methods import get_method

#: where images lie makes no difference to what they are
PLACES = ("root", "store")
Owner = TypeVar("Owner")


@dataclass(frozen=True)
class DataSeen:
    """What a run tells of its data."""

    asked: str
    """The settings of the data."""
    judged: str
    """Classes, and the numbers of validation and test images at each place, which no seed changes."""
    trained: tuple[int, bool]
    """What the training images of sites depend on besides: the seed, and whether they are pooled."""
    fingerprint: str
    """Identifies all images; nothing in runs of before it was written down."""

    @classmethod
    def of(cls, start: Mapping[str, Any]) -> DataSeen:
        """By the event that started a run."""
        config = start["config"]
        asked = {key: value for key, value in config["data"].items() if key not in PLACES}
        places = [(site["name"], site["valid"], site["test"]) for site in start["sites"]]
        judging = [place for place in places if any(place[1]) or any(place[2])]
        return cls(
            json.dumps(asked, sort_keys=True),
            json.dumps([start["classes"], judging]),
            (config["seed"], get_method(start["method"]).pooled),
            start.get("data", ""),
        )

    def conflicts(self, other: DataSeen) -> bool:
        """Whether the same settings led to other images."""
        if self.asked != other.asked:
            return False
        images = (self.fingerprint, other.fingerprint) if self.trained == other.trained else ()
        return self.judged != other.judged or (all(images) and len(set(images)) > 1)


def kinds(owners: Iterable[tuple[Owner, DataSeen]]) -> list[list[Owner]]:
    """Those who saw the same images, together; a single list where nobody's data conflict with another's."""
    found: list[list[tuple[Owner, DataSeen]]] = []
    for owner, seen in owners:
        for own in found:
            if not any(seen.conflicts(other) for _, other in own):
                own.append((owner, seen))
                break
        else:
            found.append([(owner, seen)])
    return [[owner for owner, _ in own] for own in found]


def check_same_data(run: Run, folder: Path, finished: Sequence[Path]) -> None:
    """Refuse to train in `folder` on other images than a finished run of the study has seen."""
    start = {
        "method": run.config.method,
        "config": run.config.model_dump(mode="json"),
        "classes": list(run.federation.classes),
        "sites": [class_counts(place, len(run.federation.classes)) for place in run.federation.places()],
        "data": run.fingerprint,
    }
    seen = DataSeen.of(start)
    for other in finished:
        try:
            known = DataSeen.of(first_event(other / "events.jsonl"))
        except (OSError, UserError, KeyError, TypeError, AttributeError):
            continue  # damage is told where the run is read
        if seen.conflicts(known):
            raise UserError(
                f"the data has changed since {other.name} was run: {folder.name} would not compare with it; choose "
                f"another --out, or delete {other.parent}"
            )
