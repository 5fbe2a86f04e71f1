"""What a hospital keeps of tests of a run's models: its own predictions and their intervals, which never leave it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from equipoise.data.federation import Federation
from equipoise.engine.evaluation import IMAGES
from equipoise.engine.image_scores import FILE, ImageScores, write_image_scores
from equipoise.engine.slot import EVALUATE, Outcome, Request
from equipoise.evidence.recomputed import read_predictions, scores_of
from equipoise.metrics import METRICS

#: the lines of the site's log
MAIN = METRICS[0]


def with_single(request: Request, dense: bool) -> Request:
    """A request to test models, so that it also gives predictions of each test and validation image for this site."""
    if request.action != EVALUATE or "test" not in request.measure or dense:
        return request
    return replace(request, measure=tuple(dict.fromkeys((*request.measure, "valid"))), scores=True)


def taken_out(outcome: Outcome, asked: Request, number: int) -> list[ImageScores]:
    """The predictions of single images, which leave the outcome, as do parts that the server did not ask for."""
    found = []
    for key, counts in [*outcome.measures.items()]:
        view, _, part = key.partition(".")
        if "scores" in counts:
            own = (counts[name].numpy() for name in IMAGES)
            found.append(ImageScores(number, view, asked.site, asked.data or asked.site, part, *own))
            outcome.measures[key] = {name: value for name, value in counts.items() if name not in IMAGES}
        if part not in asked.measure:
            del outcome.measures[key]
    return found


def keep(folder: Path, known: list[ImageScores], new: list[ImageScores], federation: Federation) -> list[ImageScores]:
    """Write the latest predictions of each view, part and place to the run's folder at the site; gives them all."""
    latest = {(one.view, one.part, one.site, one.place): one for one in (*known, *new)}
    write_image_scores(folder / FILE, [*latest.values()], federation)
    return [*latest.values()]


def told(folder: Path) -> str:
    """The main score of each view on the site's own test images with its interval, in words."""
    found = scores_of(read_predictions(folder), intervals=[MAIN.name])
    texts = []
    for one in found:
        if one.scope == "site" and one.split == "test" and MAIN.name in one.intervals:
            bounds = one.intervals[MAIN.name]
            texts.append(
                f"{one.view} model, {one.summary['n']} test images: {MAIN.title.lower()} {100 * bounds.value:.1f} % "
                f"({100 * bounds.low:.1f} to {100 * bounds.high:.1f})"
            )
    return "; ".join(texts)
