"""What a run reports: which round of a view at a site, and scores put together.

Rounds are measured on the same images, so that only their mean makes sense. Sites hold different images, so their
counts add up. Scores are as `Task.summary` gives them: `metrics`, `recall`, `confusion` and `n`, and `by_class` where
a task has further numbers of each class.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.cells import added, compact

Summary = dict[str, Any]

#: the view of a site's model right after local training, before anything is averaged
TRAINED = "trained"


def reported_round(view: str, site: str | None, judged: str, common: int, own: Mapping[str, int]) -> int | None:
    """The round that is reported of a view at a site; None for a figure over sites that have each their own.

    Args:
        judged: the view whose validation scores chose
        common: the federation's round
        own: the rounds of sites that chose for themselves; they hold for the models that were judged, and for what
            these were before averaging
    """
    if not own or view not in (judged, TRAINED):
        return common
    return None if site is None else own.get(site, common)


def mean_over_rounds(summaries: Sequence[Summary]) -> Summary:
    """The scores of several rounds on the same images as one: the mean of every number.

    The rows of the mean confusion matrix, whose cells may be fractions, add up to the images of each class, as those of
    each round do; `n` stays the number of images, and `rounds` says how many rounds there are, if several.
    """
    if len(summaries) == 1:
        return dict(summaries[0])
    confusion = _total(summaries)
    return {
        **_means(summaries),
        "confusion": None if confusion is None else compact(confusion / len(summaries)),
        "n": summaries[0]["n"],
        "rounds": len(summaries),
    }


def mean_over_sites(summaries: Sequence[Summary]) -> Summary:
    """The mean of each metric and recall over the sites that have it; numbers of images add up."""
    if len(summaries) == 1:
        return dict(summaries[0])
    return {**_means(summaries), **added_over_sites(summaries)}


def added_over_sites(summaries: Sequence[Summary]) -> Summary:
    """The confusion matrix and the number of all sites' images together; no matrix where a site has none."""
    confusion = _total(summaries)
    return {"confusion": None if confusion is None else compact(confusion), "n": sum(s["n"] for s in summaries)}


def _total(summaries: Sequence[Summary]) -> np.ndarray | None:
    """The sum of the confusion matrices (C, C); None where one is missing."""
    matrices = [summary["confusion"] for summary in summaries]
    return None if any(matrix is None for matrix in matrices) else added(matrices)


def _means(summaries: Sequence[Summary]) -> Summary:
    names = summaries[0]["metrics"]
    found: Summary = {
        "metrics": {name: _mean([s["metrics"].get(name) for s in summaries]) for name in names},
        "recall": [_mean(column) for column in zip(*(s["recall"] for s in summaries))],
    }
    if "by_class" in summaries[0]:
        kinds = summaries[0]["by_class"]
        found["by_class"] = {
            kind: [_mean(column) for column in zip(*(s["by_class"][kind] for s in summaries))] for kind in kinds
        }
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
