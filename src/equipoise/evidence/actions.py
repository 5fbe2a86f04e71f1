"""How a method acted, round by round, as a frame: steps, weights, margins, sizes, losses that its parts noted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

COLUMNS = ["round", "site", "component", "name", "place", "class", "sub-cluster", "value"]


def action_frame(events: Iterable[dict[str, Any]], classes: Sequence[str]) -> pd.DataFrame:
    """A line for each number noted in events `actions` of a log: its round, the site (empty: the server), who noted it,
    its name, and `place`, which counts the notes of a name within a round (epochs, say). Of tables, the class and the
    sub-cluster."""
    return pd.DataFrame([line for event in events for line in _lines(event, classes)], columns=COLUMNS)


def _lines(event: dict[str, Any], classes: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for notes_of in (event["sites"], event["server"]):
        for site, notes in notes_of.items():
            for full, values in notes.items():
                component, _, name = full.rpartition(".")
                for place, value in enumerate(values, start=1):
                    for of_class, sub_cluster, number in _numbers(value, classes):
                        yield event["round"], site, component, name, place, of_class, sub_cluster, number


def _numbers(value: Any, classes: Sequence[str]) -> Iterator[tuple[str, int | None, float]]:
    """The numbers of a note: one, one of each class, or of each class and sub-cluster."""
    if not isinstance(value, list):
        yield "", None, value
        return
    for position, own in enumerate(value):
        name = classes[position] if len(value) == len(classes) else str(position)
        if isinstance(own, list):
            yield from ((name, place, number) for place, number in enumerate(own, start=1))
        else:
            yield name, None, own
