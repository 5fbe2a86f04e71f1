"""What changes from round to round: metrics per site, their mean, and retrogress (PRR, Chen et al. 2022)."""

from collections.abc import Iterable, Mapping
from typing import Literal

from equipoise.report.events import View, mean
from equipoise.report.record import RunRecord

Curve = dict[int, float]
"""A value per round; rounds without a value are absent."""


def metric_curves(run: RunRecord, metric: str, view: View, part: str = "valid") -> dict[str, Curve]:
    """One metric of one view at every site that was scored, per round."""
    curves: dict[str, Curve] = {}
    for scored in run.evaluations:
        value = scored.metrics.get(metric)
        if scored.view == view and scored.part == part and value is not None:
            curves.setdefault(scored.site, {})[scored.round] = value
    return curves


def mean_curve(curves: Mapping[str, Curve]) -> Curve:
    """The mean, round by round, over the sites that have a value in that round."""
    rounds = sorted({number for curve in curves.values() for number in curve})
    means = {number: mean([curve.get(number) for curve in curves.values()]) for number in rounds}
    return {number: value for number, value in means.items() if value is not None}


def retrogress(run: RunRecord, metric: str = "balanced_accuracy", part: str = "valid") -> dict[str, Curve]:
    """The drop after communication, per site and round: positive where the site's model became worse.

    The metric of the model right after local training, minus that of the model the site is left with when the
    round ends (personal where rounds measured it, else global), in the same round on the same part.
    """
    before = metric_curves(run, metric, "trained", part)
    after = metric_curves(run, metric, run.round_view, part)
    drops: dict[str, Curve] = {}
    for site, trained in before.items():
        ended = after.get(site, {})
        drops[site] = {number: trained[number] - ended[number] for number in trained if number in ended}
    return {site: curve for site, curve in drops.items() if curve}


def flat(curves: Iterable[Curve]) -> bool:
    """True when nothing ever differs from zero: a figure of it would show nothing."""
    return not any(value for curve in curves for value in curve.values())


def work_curves(run: RunRecord, quantity: Literal["loss", "seconds"]) -> dict[str, Curve]:
    """Mean training loss, or seconds of work, per site and round."""
    curves: dict[str, Curve] = {}
    for finished in run.rounds:
        for site, work in finished.sites.items():
            value = getattr(work, quantity)
            if value is not None:
                curves.setdefault(site, {})[finished.round] = value
    return curves
