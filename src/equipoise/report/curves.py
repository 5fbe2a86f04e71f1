"""Curves over rounds, as frames with a line per round and a column per site: metrics, retrogress (PRR, Chen et al.
2022), and work."""

from __future__ import annotations

import numpy as np
import pandas as pd

from equipoise.report.measured import main_metric
from equipoise.report.record import RunRecord


def metric_curves(run: RunRecord, metric: str, view: str, part: str = "valid") -> pd.DataFrame:
    """One metric of one view at every site that was scored, per round."""
    made = run.made
    if (metric, view, part) not in made:
        scored = run.evaluations
        made[metric, view, part] = _by_round(scored[(scored["view"] == view) & (scored["part"] == part)], metric)
    return made[metric, view, part]


def retrogress(run: RunRecord, metric: str | None = None, part: str = "valid") -> pd.DataFrame:
    """The drop after communication, per site and round: positive where the site's model became worse.

    The metric (by default the main one of the run's task) of the model right after local training, minus that of the
    model the site is left with when the round ends. Both are of the same round and part. The latter model is the
    personal one where rounds measured it, else the global one.
    """
    metric = metric or main_metric(run).name
    before = metric_curves(run, metric, "trained", part)
    drops = before - metric_curves(run, metric, run.round_view, part)
    return drops.reindex(columns=before.columns).dropna(axis=0, how="all").dropna(axis=1, how="all")


def work_curves(run: RunRecord, quantity: str) -> pd.DataFrame:
    """Mean training loss, or seconds of work, per site and round."""
    return _by_round(run.work, quantity)


def flat(curves: pd.DataFrame) -> bool:
    """True when nothing ever differs from zero: a figure of it would show nothing."""
    return not curves.fillna(0).any(axis=None)


def _by_round(lines: pd.DataFrame, value: str) -> pd.DataFrame:
    """The known values by round and site; sites stay in their order."""
    known = lines[lines[value].notna()] if value in lines else lines[:0].assign(**{value: 0.0})
    rounds, row = np.unique(known["round"], return_inverse=True)
    column, sites = pd.factorize(known["site"])
    table = np.full((len(rounds), len(sites)), np.nan)
    table[row, column] = known[value]
    return pd.DataFrame(table, pd.Index(rounds, name="round"), pd.Index([*sites], dtype=object, name="site"))
