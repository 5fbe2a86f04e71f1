"""Scores made anew from a run's predictions: equal to those that the run has logged, and by sub-groups of images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.bootstrap import (
    DRAWS,
    Interval,
    Resampled,
    drawn_weights,
    exact_counts,
    generator_of,
    interval,
    over_sites,
    with_sample,
)
from equipoise.core.errors import UserError
from equipoise.engine.image_scores import FILE, PREDICTION, Predictions, read_image_scores
from equipoise.engine.reported import mean_over_rounds, mean_over_sites
from equipoise.metrics import EVERY, METRICS
from equipoise.tallies import Floats
from equipoise.tasks.classification import Classification

Summary = dict[str, Any]


@dataclass(frozen=True)
class Scored:
    """The scores of one view at a site, as the mean over sites, or pooled over all images.

    Args:
        by: the sub-group, by column
        intervals: by metric, if requested
    """

    view: str
    scope: str
    site: str
    place: str
    split: str
    summary: Summary
    by: Mapping[str, str] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)


def read_predictions(run: Path, finished: bool = True) -> Predictions:
    """The predictions of a run.

    Raises:
        UserError: where the run has none
    """
    path = run / FILE
    if not path.exists():
        why = "its sites kept them" if finished else "it is not finished; go on with resume()"
        raise UserError(f"{run} holds no predictions of single images: {why}")
    return read_image_scores(path)


def summary_of(task: Classification, labels: np.ndarray, predictions: np.ndarray, probabilities: Floats) -> Summary:
    """The metrics, recalls and confusion matrix of some predictions, bit for bit as in the run. Only the loss may
    differ in the last digits, since the run sums it from logits."""
    exact = {name: torch.from_numpy(values) for name, values in exact_counts(labels, probabilities).items()}
    return task.summary(task.counts_of(labels, predictions, probabilities) | exact)


def scores_of(
    predictions: Predictions, by: Sequence[str] = (), intervals: Sequence[str] = (), draws: int = DRAWS
) -> Iterator[Scored]:
    """The scores of every split and view: at each site, their mean, and pooled. Of several rounds, the mean.

    Args:
        by: columns whose values make sub-groups
        intervals: the metrics whose intervals are wanted
    """
    unknown = [title for title in by if title not in predictions.extra]
    if unknown:
        known = ", ".join(predictions.extra) or "none"
        raise UserError(
            f"the predictions have no column {unknown[0]!r} for sub-groups; there are: {known}. A run keeps "
            "the further columns of its manifest (in Python: subgroups= of from_frame and from_arrays). Add it there, "
            "then evaluate with --data"
        )
    weights = Weights([predictions], draws) if intervals else None
    for where, chosen in sub_groups(predictions, ("split", "view"), by):
        part = predictions.where(chosen)
        view, split = where["view"], where["split"]
        named = {title: where[title] for title in by}
        yield from _of_view(part, view, split, named, intervals, weights)


def sub_groups(
    predictions: Predictions, columns: Sequence[str], by: Sequence[str] = ()
) -> Iterator[tuple[dict[str, str], np.ndarray]]:
    """The distinct values of some columns, each with its rows (n,), in the order in which they come; those of `by` are
    sorted."""
    every = [predictions.columns[name] for name in columns] + [predictions.extra[title] for title in by]
    numbers = np.zeros(len(predictions), dtype=np.int64)
    for place, values in enumerate(every):
        _, first, own = np.unique(values, return_index=True, return_inverse=True)
        if place < len(columns):
            own = np.argsort(np.argsort(first))[own]  # in the order in which they come
        numbers = numbers * len(first) + own
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    for one, position in enumerate(first):
        names = dict(zip((*columns, *by), (str(values[position]) for values in every)))
        yield names, np.flatnonzero(inverse == one)


class Weights:
    """The resamples of all groups at each place: the same ones for all models that are measured there.

    Args:
        several: the predictions of one run, or of several that are compared
    """

    def __init__(self, several: Sequence[Predictions], draws: int = DRAWS):
        self.draws = draws
        self.names: dict[str, np.ndarray] = {}
        for place in dict.fromkeys(place for own in several for place in np.unique(own.columns["place"]).tolist()):
            groups = [own.columns["group"][own.columns["place"] == place] for own in several]
            self.names[place] = np.unique(np.concatenate(groups))
        self.of = {
            place: with_sample(drawn_weights(len(names), generator_of(place), draws))
            for place, names in self.names.items()
        }

    def resampled(self, predictions: Predictions) -> Resampled:
        """The resamples of some predictions, each place's groups drawn among themselves."""
        columns, places = predictions.columns, np.unique(predictions.columns["place"]).tolist()
        groups, offset, weights = np.zeros(len(predictions), dtype=np.int64), 0, []
        for place in places:
            own = columns["place"] == place
            groups[own] = offset + np.searchsorted(self.names[place], columns["group"][own])
            offset += len(self.names[place])
            weights.append(self.of[place])
        every = weights[0] if len(weights) == 1 else np.concatenate(weights, axis=1)
        return Resampled(columns["label"], columns["probabilities"], columns[PREDICTION], groups, every)


class _One:
    """One resample of many, for metrics that are written for a single tally."""

    def __init__(self, many: Resampled, place: int):
        self.many, self.place = many, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self.many, name)[self.place]


def metrics_of(resampled: Resampled, names: Sequence[str]) -> dict[str, Floats]:
    """Some metrics of every resample, (B,) each; a metric from outside may have none, for want of its counts."""
    draws, found = len(resampled.weights) - 1, dict[str, Floats]()
    for metric in METRICS:
        if metric.name in names:
            with suppress(AttributeError, KeyError):
                values = np.asarray(metric.of(resampled))
                if values.shape != (draws,):
                    values = np.array([metric.of(_One(resampled, place)) for place in range(draws)])  # type: ignore[arg-type]
                found[metric.name] = values
    return found


def models(predictions: Predictions) -> Iterator[tuple[tuple[str, str], list[Predictions]]]:
    """The predictions by site and place, those of each round apart."""
    for where, chosen in sub_groups(predictions, ("site", "place")):
        own = predictions.where(chosen)
        rounds = dict.fromkeys(own.columns["round"].tolist())
        yield (where["site"], where["place"]), [own.where(own.columns["round"] == number) for number in rounds]


def mean_resamples(of_rounds: Sequence[Predictions], weights: Weights, names: Sequence[str]) -> dict[str, Floats]:
    """The resampled metrics (B,) of one model, means over its rounds."""
    found = [metrics_of(weights.resampled(own), names) for own in of_rounds]
    return {name: np.mean([own[name] for own in found], axis=0) for name in found[0]}


def sites_together(resampled: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """The resampled mean over sites (B,) of each metric."""
    generator = generator_of("sites")
    return {name: over_sites(np.stack([own[name] for own in resampled]), generator) for name in resampled[0]}


def joined(several: Sequence[Predictions]) -> Predictions:
    """The predictions of several sites as one."""
    columns = {name: np.concatenate([own.columns[name] for own in several]) for name in several[0].columns}
    return Predictions(several[0].classes, columns)


def _of_view(
    part: Predictions, view: str, split: str, by: dict[str, str], names: Sequence[str], weights: Weights | None
) -> Iterator[Scored]:
    task = Classification(part.classes, EVERY)
    per_round: dict[int, list[tuple[Summary, Predictions]]] = {}
    resampled: list[dict[str, Floats]] = []
    for (site, place), rounds in models(part):
        summaries = [_summary(task, own) for own in rounds]
        for number, one in enumerate(zip(summaries, rounds)):
            per_round.setdefault(number, []).append(one)
        drawn = mean_resamples(rounds, weights, names) if weights else {}
        resampled.append(drawn)
        whole = mean_over_rounds(summaries)
        yield Scored(view, "site", site, place, split, whole, by, _intervals(whole, drawn))
    means = mean_over_rounds([mean_over_sites([summary for summary, _ in own]) for own in per_round.values()])
    of_mean = sites_together(resampled) if weights else {}
    yield Scored(view, "mean", "", "", split, means, by, _intervals(means, of_mean))
    pools = [joined([own for _, own in found]) for found in per_round.values()]
    pooled = mean_over_rounds([_summary(task, pool) for pool in pools])
    of_pool = mean_resamples(pools, weights, names) if weights else {}
    yield Scored(view, "pooled", "", "", split, pooled, by, _intervals(pooled, of_pool))


def _intervals(summary: Summary, resamples: Mapping[str, Floats]) -> dict[str, Interval]:
    values = summary["metrics"]
    return {name: interval(_known(values.get(name)), drawn) for name, drawn in resamples.items()}


def _known(value: float | None) -> float:
    return float("nan") if value is None else value


def _summary(task: Classification, own: Predictions) -> Summary:
    columns = own.columns
    return summary_of(task, columns["label"], columns[PREDICTION], columns["probabilities"])
