"""Validation scores in the shape of test results: of the rounds that a run reports, or of its latest one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from equipoise.metrics import from_confusion
from equipoise.report.events import Confusion, Evaluation, Metrics, Result, Selection, View, mean


def validation_results(
    evaluations: Sequence[Evaluation], selection: Selection | None, settings: Mapping[str, Any]
) -> Iterator[Result]:
    """Results by view, marked `part="valid"`: per site, mean over sites, and pooled where there are confusions.

    Args:
        evaluations: all scores of the run, in the order of its rounds
        selection: which round was chosen; None while none is: the latest round of each view stands
        settings: the run's `[evaluation]` table
    """
    for view in get_args(View):
        scored = [each for each in evaluations if each.part == "valid" and each.view == view]
        sites: dict[str, list[Evaluation]] = {}
        for each in scored:
            rounds = _reported(selection, settings, view, each.site) if selection else (scored[-1].round,)
            if each.round in rounds:
                sites.setdefault(each.site, []).append(each)
        if sites:
            head = {"part": "valid", "rule": selection.rule if selection else "latest", "view": view}
            yield from _of_view(head, sites)


def _reported(selection: Selection, settings: Mapping[str, Any], view: str, site: str) -> Sequence[int]:
    """The rounds that are reported of a view at a site: one, or several where their mean is."""
    # A site's own choice holds for the models that were judged, and for what they were before averaging.
    own = selection.sites.get(site) if view in (selection.view, "trained") else None
    last = own.round if own else selection.round
    if selection.rule != "mean_last":
        return (last,)
    return range(max(last - settings.get("last", 1) + 1, settings.get("first_round", 1)), last + 1)


def _of_view(head: Mapping[str, Any], sites: Mapping[str, Sequence[Evaluation]]) -> Iterator[Result]:
    """The results of one view, from each site's scores in the reported rounds."""
    results = [
        Result.model_validate({**head, "scope": "site", "site": site, "round": own[-1].round, **_mean_score(own)})
        for site, own in sites.items()
    ]
    yield from results
    rounds = {result.round for result in results}
    over = {**head, "round": rounds.pop() if len(rounds) == 1 else None}
    yield Result.model_validate({**over, "scope": "mean", "metrics": _mean_metrics(results)})
    counts = _added([result.confusion for result in results])
    if counts is not None:
        numbers = {name: _known(value) for name, value in from_confusion(counts).items() if name != "recall"}
        recall = [_known(value) for value in from_confusion(counts)["recall"]]
        pooled = {"scope": "pooled", "metrics": numbers, "recall": recall, "confusion": counts}
        yield Result.model_validate({**over, **pooled})


def _mean_score(scored: Sequence[Evaluation]) -> dict[str, Any]:
    """Mean of each metric and of each class's recall; confusion matrices add up."""
    return {
        "metrics": _mean_metrics(scored),
        "recall": [mean(values) for values in zip(*(each.recall for each in scored))],
        "confusion": _added([each.confusion for each in scored]),
    }


def _mean_metrics(scored: Sequence[Evaluation | Result]) -> Metrics:
    return {name: mean([each.metrics.get(name) for each in scored]) for name in scored[0].metrics}


def _added(confusions: Sequence[Confusion | None]) -> Confusion | None:
    known = [confusion for confusion in confusions if confusion is not None]
    return np.sum(known, axis=0).tolist() if len(known) == len(confusions) else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
