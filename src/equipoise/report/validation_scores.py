"""Validation scores in the shape of test results: of the rounds that a run reports, or of its latest one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, get_args

import pandas as pd

from equipoise.cells import dense
from equipoise.contract.tables import EvaluationConfig
from equipoise.core.validation import validated
from equipoise.engine.reported import Summary, added_over_sites, mean_over_rounds, mean_over_sites, reported_round
from equipoise.metrics import from_confusion
from equipoise.report.log_lines import Selection, View


def validation_scores(
    scored: pd.DataFrame,
    lines: Callable[[Iterable[int]], Iterator[Mapping[str, Any]]],
    selection: Selection | None,
    settings: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Flat lines by view, marked `part="valid"`: per site, mean over sites, and pooled where there are confusions.

    Args:
        scored: all validation scores of the run, in the order of its rounds
        lines: gives the events of scores by their `offset`
        selection: which round was chosen; None while none is: the latest round of each view stands
        settings: the run's `[evaluation]` table
    """
    averaged = _averaged(selection, settings) if selection else ()
    rule = selection.rule if selection else "latest"
    for view in get_args(View):
        own = scored[scored["view"] == view]
        if averaged:
            chosen = own["round"].isin(averaged)
        elif selection:
            rounds = {site: _chosen(selection, view, str(site)) for site in own["site"].unique()}
            chosen = own["round"] == own["site"].astype(object).map(rounds)
        else:
            chosen = own["round"] == own["round"].max()
        summaries: dict[str, list[Summary]] = {}
        for site, event in zip(own["site"][chosen], lines(own["offset"][chosen])):
            summaries.setdefault(site, []).append({"confusion": None, "n": 0, "recall": [], **event})
        for result in _of_view(summaries) if summaries else ():
            yield {"part": "valid", "rule": rule, "view": view, **result}


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


def _of_view(sites: Mapping[str, list[Summary]]) -> Iterator[dict[str, Any]]:
    """The results of one view, from each site's scores in the reported rounds."""
    means = {site: mean_over_rounds(own) for site, own in sites.items()}
    rounds = {site: own[-1]["round"] for site, own in sites.items()}
    for site, own in means.items():
        yield _flat(own) | {"scope": "site", "site": site, "round": rounds[site]}
    over = {"round": rounds.popitem()[1] if len({*rounds.values()}) == 1 else None}
    yield over | {"scope": "mean"} | mean_over_sites([*means.values()])["metrics"]
    images = added_over_sites([*means.values()])
    if images["confusion"] is not None:
        yield over | {"scope": "pooled"} | _flat(mean_over_rounds(list(map(_pooled, _by_round(sites)))) | images)


def _flat(summary: Summary) -> dict[str, Any]:
    """A summary as part of a flat line."""
    told = {key: summary[key] for key in ("recall", "confusion")}
    return {**told, "rounds": summary.get("rounds", 1), **summary["metrics"]}


def _by_round(sites: Mapping[str, list[Summary]]) -> list[list[Summary]]:
    """The scores of each round that a mean is of; as one round where every site has one, be it its own."""
    alone = all(len(own) == 1 for own in sites.values())
    rounds: dict[int, list[Summary]] = {}
    for each in (each for own in sites.values() for each in own):
        rounds.setdefault(0 if alone else each["round"], []).append(each)
    return list(rounds.values())


def _pooled(scores: list[Summary]) -> Summary:
    """The scores on all sites' images of a round as one set."""
    images = added_over_sites(scores)
    numbers = from_confusion(dense(images["confusion"]))
    recall = [_known(value) for value in numbers.pop("recall")]
    return {"metrics": {name: _known(value) for name, value in numbers.items()}, "recall": recall, **images}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
