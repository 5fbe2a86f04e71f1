"""What a reply from a site elsewhere must look like before anything of it is used: a site may be broken, or lie."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from equipoise.contract.protocol import Tensors
from equipoise.core.table import LARGEST_COUNT
from equipoise.hospitals.parcels import KINDS, UnreadableParcel, read_counts
from equipoise.tasks import Task

#: what a site may tell about its work, besides counts
FACTS = ("loss", "examples", "steps", "seconds")
#: characters of a site's own words that are passed on
LONGEST_WORDS = 500


def plausible(value: float) -> bool:
    """Whether a number is one that arithmetic can hold; NaN and infinity are, for a model that diverged has them."""
    return abs(value) <= (LARGEST_COUNT if isinstance(value, int) else math.inf) or value != value


def words_of(error: Any) -> str:
    """What a site says went wrong, cut to a sensible length."""
    return str(error)[:LONGEST_WORDS]


def read_noted(
    header: Mapping[str, Any],
    measured: Collection[str],
    task: Task,
    described: Mapping[str, Sequence[int]] | None = None,
    least: int = 0,
) -> dict[str, Any]:
    """The part of a reply's header that is kept: whether the site wrote a state, its counts, facts of its work.

    Args:
        measured: the server's request to measure, as `view.part`
        task: knows how counts should look
        described: the images of each class that the site said it has, by part; counts have to agree
        least: `privacy.least` of the run

    Raises:
        UnreadableParcel: when something is missing or not what it should be
    """
    try:
        facts, measures, kept = header["facts"], header["measures"], header["kept"]
        stranger = next((place for place in measures if place not in measured), None)
        if stranger is not None:
            raise UnreadableParcel(f"it measured '{stranger[:LONGEST_WORDS]}', which the server did not request")
        for place, counts in measures.items():
            _check_counts(place, counts, task.template)
        if described is not None:
            _check_described(measures, measured, described, task, least)
        for name, value in facts.items():
            if name not in FACTS or isinstance(value, bool) or not isinstance(value, int | float):
                raise UnreadableParcel(f"'{name[:LONGEST_WORDS]}' is no entry that a site may report")
            if not plausible(value) or (name != "loss" and not value >= 0):
                raise UnreadableParcel(f"'{name}' is {words_of(value)}, which no work comes to")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as problem:
        raise UnreadableParcel(f"it is incomplete ({type(problem).__name__}: {words_of(problem)})") from None
    return {"kept": bool(kept), "measures": measures, "facts": facts}


def _check_described(
    measures: Mapping[str, Any],
    measured: Collection[str],
    described: Mapping[str, Sequence[int]],
    task: Task,
    least: int,
) -> None:
    """Compare counts with what a site said of its images, all of which it measures at the server's request."""
    for place in sorted(measured):
        images = sum(described.get(place.partition(".")[2], ()))
        if images and place not in measures:
            raise UnreadableParcel(f"it did not measure '{place}', though it described {images} images")
    for place, counts in read_counts(measures).items():
        own = described.get(place.partition(".")[2]) or [0] * task.num_classes
        if problem := task.problem(counts, own, least):
            raise UnreadableParcel(f"the counts of '{place}' cannot be right: {problem}")


def _check_counts(place: str, counts: Mapping[str, Any], template: Tensors) -> None:
    if counts.keys() != template.keys():
        raise UnreadableParcel(f"the counts of '{place}' are {', '.join(counts)[:LONGEST_WORDS]}")
    for name, (kind, values) in counts.items():
        tensor, expected = torch.tensor(values, dtype=KINDS[kind]), template[name]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise UnreadableParcel(f"'{name}' of '{place}' is {tuple(tensor.shape)} of {tensor.dtype}")
        if not tensor.is_floating_point() and bool((tensor < 0).any()):
            raise UnreadableParcel(f"'{name}' of '{place}' counts fewer than no images")
