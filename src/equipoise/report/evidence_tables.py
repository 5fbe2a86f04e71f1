"""Tables of what a run left beside its log: intervals and sub-groups of its predictions, its actions, an audit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from equipoise.bootstrap import CONFIDENCE
from equipoise.engine.auditing import read_audit
from equipoise.engine.image_scores import FILE
from equipoise.evidence.actions import action_frame
from equipoise.evidence.recomputed import Scored, read_predictions, scores_of
from equipoise.metrics import METRICS
from equipoise.report.record import RunRecord
from equipoise.report.run_tables import SCOPE_TITLES
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.wording import UNKNOWN, bounds_told, percent

#: sites of which each has a line, lines of noted numbers that people read, sub-groups of a column
MOST_SITES, MOST_NOTED, MOST_GROUPS = 20, 60, 30
SHOWN = [metric for metric in METRICS if metric.in_tables]
#: with more images than this, areas under curves would take long
MOST_IMAGES = 10_000
RESAMPLED = (
    "Groups of images (lesions, patients; without groups, images) were drawn a thousand times with replacement within "
    "each site. Where a class has fewer than about ten groups, an interval is too narrow. Scores are made anew from "
    "the run's predictions."
)
NOTED = (
    "Means over the epochs and sub-clusters of a round. `Result.actions()` gives every number. What each number is "
    "stands in docs/evidence.md."
)
ATTACKED = (
    "An AUC of 50 % is guessing: nobody can tell who was trained on. Sensitivity is the share of training images that "
    "the attack finds. In brackets, 95 % intervals."
)


def interval_sheet(run: RunRecord) -> Sheet | None:
    """Scores and bounds in per cent by view and place; None where the run kept no predictions of single images."""
    found = [*resampled(run)]
    if sum(one.scope == "site" for one in found) > MOST_SITES:
        found = [one for one in found if one.scope != "site"]
    names = {"View": [one.view for one in found], "Scope": [one.site or SCOPE_TITLES[one.scope] for one in found]}
    return _bounds(f"Scores with {CONFIDENCE:.0%} intervals over images, per cent.", names, found, [RESAMPLED])


def sub_group_sheets(run: RunRecord) -> list[Sheet]:
    """A table for each column of the images: the pooled scores of its sub-groups, of the view a site is left with."""
    sheets = []
    for title in dict.fromkeys(name for one in resampled(run, True) for name in one.by):
        found = [one for one in resampled(run, True) if title in one.by][:MOST_GROUPS]
        names = {title.capitalize(): [str(one.by[title]) for one in found]}
        names["Images"] = [f"{one.summary['n']:,}" for one in found]
        caption = f"Scores by {title}, of all images together, {found[0].view} view, with {CONFIDENCE:.0%} intervals."
        sheets += [shown] if (shown := _bounds(caption, names, found, [])) else []
    return sheets


def _bounds(caption: str, names: dict[str, list[str]], found: Sequence[Scored], notes: Sequence[str]) -> Sheet | None:
    """Lines of scores with bounds in per cent."""
    shown = [metric for metric in SHOWN if found and metric.name in found[0].intervals]
    columns = {metric.title: [bounds_told(one.intervals[metric.name]) for one in found] for metric in shown}
    return sheet(caption, names, columns, notes=notes) if shown else None


def resampled(run: RunRecord, by_group: bool = False) -> Sequence[Scored]:
    """The scores of a run's predictions with their intervals, or of sub-groups; none without predictions."""
    file = run.folder / FILE
    view = run.end_view if by_group else ""
    return _resampled(run.folder, file.stat().st_mtime_ns, run.part, view) if file.exists() else ()


@lru_cache(maxsize=64)
def _resampled(folder: Path, written: int, split: str, view: str) -> Sequence[Scored]:
    """The same, made once for the table and the figures of a page; `written` is when the file was, `view` that of
    sub-groups."""
    predictions = read_predictions(folder)
    chosen = predictions.where(predictions.columns["split"] == split)
    shown = [metric.name for metric in SHOWN if metric.needs != "auc" or len(chosen) <= MOST_IMAGES]
    if not len(chosen):
        return ()
    if not view:
        return tuple(scores_of(chosen, intervals=shown))
    own = chosen.where(chosen.columns["view"] == view)
    titles = [title for title, values in own.extra.items() if 1 < len(np.unique(values)) <= MOST_GROUPS]
    return tuple(one for title in titles for one in scores_of(own, [title], shown) if one.scope == "pooled")


def action_sheet(run: RunRecord) -> Sheet | None:
    """The numbers that components noted in the first, a middle and the last round; None where there are none."""
    rounds = [*run.actions]
    shown = list(dict.fromkeys((rounds[0], rounds[len(rounds) // 2], rounds[-1]))) if rounds else []
    told = action_frame(run.lines(run.actions[number] for number in shown), run.start.classes)
    if told.empty:
        return None
    names = ["component", "name", "site", "class"]
    while len(names) > 2 and len(told.groupby(names)) > MOST_NOTED:
        names.pop()
    table = told.pivot_table("value", names, "round", "mean", sort=False).reindex(columns=shown)
    heads = {"name": "Number"}
    index = table.index.to_frame(index=False).rename(columns=lambda name: heads.get(name, name.capitalize()))
    cells = {f"Round {n}": [UNKNOWN if pd.isna(value) else f"{value:.3g}" for value in table[n]] for n in shown}
    return sheet("How the method acted.", {name: index[name].tolist() for name in index}, cells, notes=[NOTED])


def audit_sheet(run: RunRecord) -> Sheet | None:
    """What `equipoise audit` found: how well the models tell who was trained on, the rarest class first."""
    audit = read_audit(run.folder)
    if audit is None:
        return None
    groups = audit["groups"]
    names = {"Of": [own["scope"] for own in groups], "Name": [own["name"] for own in groups]}
    columns = {"Trained on": [f"{own['members']:,}" for own in groups]}
    columns["AUC"] = [_told(own["auc"]) for own in groups]
    columns[f"Sensitivity at {audit['false_positives']:.0%} false alarms"] = [_told(own["found"]) for own in groups]
    text = f"Who was trained on, per cent: {audit['attack']} with {audit['shadows']} shadow runs."
    return sheet(text, names, columns, notes=[ATTACKED])


def _told(numbers: Sequence[float | None]) -> str:
    """A number and its bounds, which are not known of few images."""
    value, *ends = map(percent, numbers)
    return f"{value} ({' to '.join(ends)})" if ends and UNKNOWN not in ends else value
