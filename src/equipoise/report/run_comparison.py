"""Figures and tables that set several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from equipoise.metrics import METRICS
from equipoise.report import plotting as plot
from equipoise.report.curves import flat, metric_curves, retrogress
from equipoise.report.record import RunRecord

MAIN = METRICS[0]
MOST_SITES = 8
MOST_CLASSES = 12


def same_federation(runs: Sequence[RunRecord]) -> bool:
    """True when every run trained on the same sites with the same counts."""
    first = runs[0].start
    return all(run.start.sites == first.sites and run.start.classes == first.classes for run in runs)


def overlaid_learning(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """The first metric of every run on validation data: the mean over sites, then each site they share."""
    curves = [metric_curves(run, MAIN.name, run.round_view) for run in runs]
    if all(each.empty for each in curves):
        return None
    shared = [site for site in curves[0] if all(site in each for each in curves)]
    panels = {"Mean over sites": [each.mean(axis=1) for each in curves]}
    if 1 < len(shared) <= MOST_SITES:
        panels |= {site: [each[site] for each in curves] for site in shared}
    figure, axes = plot.small_panels(list(panels), f"{MAIN.title} (%)", 4, 0.4, 2.2 if len(panels) > 4 else 2.8)
    for ax, lines in zip(axes, panels.values()):
        for place, curve in enumerate(lines):
            plot.draw_curve(ax, curve, 100, **_line(place))
    _legend(figure, labels)
    return figure


def overlaid_retrogress(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Mean drop of the first metric after each communication, a line per run; None where all are zero."""
    curves = [retrogress(run).mean(axis=1) for run in runs]
    if flat(pd.concat(curves, axis=1)):
        return None
    figure = plot.canvas(plot.FULL_WIDTH, 2.8)
    ax = figure.subplots()
    ax.axhline(0, color=plot.MUTED, linewidth=0.8)
    for place, curve in enumerate(curves):
        plot.draw_curve(ax, curve, 100, **_line(place))
    ax.set_ylabel(f"Drop in {MAIN.title.lower()} (points)")
    plot.round_axis(ax)
    _legend(figure, labels)
    return figure


def class_recall(run: RunRecord) -> pd.Series:
    """Recall per class of the view a site is left with: pooled, else the mean over the sites that know it."""
    own = run.results[(run.results["view"] == run.end_view) & (run.results["recall"].str.len() > 0)]
    scopes = [own[own["scope"] == scope] for scope in ("pooled", "site")]
    chosen = next((each for each in scopes if len(each)), own)
    return pd.DataFrame(chosen["recall"].tolist(), columns=run.start.classes, dtype=float).mean().dropna()


def rare_class_recall(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Recall per class, rarest class on top, a mark per run."""
    recalls = 100 * pd.DataFrame({place: class_recall(run) for place, run in enumerate(runs)})
    images = runs[0].training_images.sum()
    classes = images[images.index.isin(recalls.index)].sort_values(kind="stable")[:MOST_CLASSES]
    if not len(classes):
        return None
    recalls = recalls.reindex(classes.index)
    figure = plot.canvas(plot.FULL_WIDTH, 0.9 + 0.3 * len(classes))
    ax = figure.subplots()
    ax.grid(axis="y", visible=False)
    for row, values in enumerate(recalls.to_numpy()):
        ends = [np.nanmin(values), np.nanmax(values)]
        ax.plot(ends, [row, row], color=plot.FAINT, linewidth=2.5, zorder=1)
    for place, recall in recalls.items():
        known = np.flatnonzero(recall.notna())
        if len(known):
            ax.plot(recall.iloc[known], known, **_mark(place))
    ax.set_yticks(range(len(classes)), [f"{plot.plain(name)}  (n = {count:,})" for name, count in classes.items()])
    ax.set(xlabel="Recall (%)", xlim=(-2, 102), ylim=(len(classes) - 0.5, -0.5))
    ax.set_ylabel("Class, training images")
    _legend(figure, labels, marks=True)
    return figure


def _line(place: int) -> dict[str, Any]:
    """A line per run; when the colours are used up they come again with another dash."""
    dash = ("-", "--", ":")[place // len(plot.PALETTE) % 3]
    return {"color": plot.PALETTE[place % len(plot.PALETTE)], "linewidth": 1.5, "linestyle": dash}


def _mark(place: int) -> dict[str, Any]:
    look = {"marker": plot.MARKERS[place % len(plot.MARKERS)], "markersize": 6, "markeredgewidth": 0}
    return {"color": plot.PALETTE[place % len(plot.PALETTE)], "linestyle": "none", **look}


def _legend(figure: Figure, labels: Sequence[str], *, marks: bool = False) -> None:
    look = _mark if marks else _line
    handles = [Line2D([], [], **look(place)) for place in range(len(labels))]
    _, columns = plot.grid_shape(len(labels), 6)
    figure.legend(handles, [plot.plain(label) for label in labels], loc="outside upper left", ncols=columns)
