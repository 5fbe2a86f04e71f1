"""Validation scores in the shape of test results: of the rounds that a run reports, or of its latest one."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from equipoise.contract.config import EvaluationConfig, validated
from equipoise.engine.reported import Summary, added_over_sites, mean_over_rounds, reported_round
from equipoise.metrics import from_confusion
from equipoise.report.events import Evaluation, Result, Selection, View, mean


def validation_results(
    evaluations: Sequence[Evaluation], selection: Selection | None, settings: Mapping[str, Any]
) -> Iterator[Result]:
    """Results by view, marked `part="valid"`: per site, mean over sites, and pooled where there are confusions.

    Args:
        evaluations: all scores of the run, in the order of its rounds
        selection: which round was chosen; None while none is: the latest round of each view stands
        settings: the run's `[evaluation]` table
    """
    averaged = _averaged(selection, settings) if selection else ()
    for view in get_args(View):
        scored = [each for each in evaluations if each.part == "valid" and each.view == view]
        sites: dict[str, list[Evaluation]] = {}
        for each in scored:
            rounds = averaged or (_chosen(selection, view, each.site) if selection else scored[-1].round,)
            if each.round in rounds:
                sites.setdefault(each.site, []).append(each)
        if sites:
            head = {"part": "valid", "rule": selection.rule if selection else "latest", "view": view}
            yield from _of_view(head, sites)


def _chosen(selection: Selection, view: str, site: str) -> int | None:
    """The round that is reported of a view at a site."""
    own = {name: choice.round for name, choice in selection.sites.items()}
    return reported_round(view, site, selection.view, selection.round, own)


def _averaged(selection: Selection, settings: Mapping[str, Any]) -> Collection[int]:
    """The rounds whose mean is reported, as the engine reads the settings; none where a single round is."""
    if selection.rule != "mean_last":
        return ()
    raw = {**settings, "rule": selection.rule}
    return validated(EvaluationConfig, raw, "the run's config").reportable(selection.round)


def _of_view(head: Mapping[str, Any], sites: Mapping[str, Sequence[Evaluation]]) -> Iterator[Result]:
    """The results of one view, from each site's scores in the reported rounds."""
    summaries = {site: mean_over_rounds([_summary(each) for each in own]) for site, own in sites.items()}
    results = [
        Result.model_validate({**head, "scope": "site", "site": site, "round": own[-1].round, **summaries[site]})
        for site, own in sites.items()
    ]
    yield from results
    rounds = {result.round for result in results}
    over = {**head, "round": rounds.pop() if len(rounds) == 1 else None}
    metrics = {name: mean([each.metrics.get(name) for each in results]) for name in results[0].metrics}
    yield Result.model_validate({**over, "scope": "mean", "metrics": metrics})
    images = added_over_sites([*summaries.values()])
    if images["confusion"] is not None:
        pooled = mean_over_rounds([_pooled(scores) for scores in _by_round(sites)])
        yield Result.model_validate({**over, "scope": "pooled", **pooled, **images})


def _summary(each: Evaluation) -> Summary:
    return each.model_dump(include={"metrics", "recall", "confusion", "n"})


def _by_round(sites: Mapping[str, Sequence[Evaluation]]) -> list[list[Evaluation]]:
    """The scores of each round that a mean is of; as one round where every site has one, be it its own."""
    alone = all(len(own) == 1 for own in sites.values())
    rounds: dict[int, list[Evaluation]] = {}
    for each in (each for own in sites.values() for each in own):
        rounds.setdefault(0 if alone else each.round, []).append(each)
    return list(rounds.values())


def _pooled(scores: Sequence[Evaluation]) -> Summary:
    """The scores on all sites' images of a round as one set."""
    images = added_over_sites([_summary(each) for each in scores])
    numbers = from_confusion(images["confusion"])
    recall = [_known(value) for value in numbers.pop("recall")]
    return {"metrics": {name: _known(value) for name, value in numbers.items()}, "recall": recall, **images}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
