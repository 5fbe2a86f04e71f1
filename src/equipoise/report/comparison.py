"""Figures and tables that set several runs side by side."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from equipoise.report.curves import Curve, flat, mean_curve, metric_curves, retrogress
from equipoise.report.events import mean
from equipoise.report.plotting import (
    FAINT,
    FULL_WIDTH,
    MARKERS,
    MUTED,
    PALETTE,
    canvas,
    draw_curve,
    grid_shape,
    lowest_panels,
    plain,
    round_axis,
)
from equipoise.report.record import RunRecord

MOST_SITES = 8
MOST_CLASSES = 12


def same_federation(runs: Sequence[RunRecord]) -> bool:
    """True when every run trained on the same sites with the same counts."""
    first = runs[0].start
    return all(run.start.sites == first.sites and run.start.classes == first.classes for run in runs)


def overlaid_learning(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Validation balanced accuracy of every run: the mean over sites, then each site they share."""
    curves = [metric_curves(run, "balanced_accuracy", run.round_view) for run in runs]
    if not any(curves):
        return None
    means = [mean_curve(each) for each in curves]
    shared = [site for site in curves[0] if all(site in each for each in curves)]
    panels: list[tuple[str, list[Curve]]] = [("Mean over sites", means)]
    if 1 < len(shared) <= MOST_SITES:
        panels += [(site, [each[site] for each in curves]) for site in shared]
    rows, columns = grid_shape(len(panels), 4)
    figure = canvas(FULL_WIDTH, 0.4 + (2.2 if rows > 1 else 2.8) * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for ax, (title, lines) in zip(axes.flat, panels):
        for place, curve in enumerate(lines):
            draw_curve(ax, curve, 100, **_line(place))
        ax.set_title(plain(title))
    for ax in lowest_panels(axes, len(panels)):
        round_axis(ax)
    for ax in axes[:, 0]:
        ax.set_ylabel("Balanced accuracy (%)")
    _legend(figure, labels)
    return figure


def overlaid_retrogress(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Mean drop in balanced accuracy after each communication, a line per run; None where all are zero."""
    curves = [mean_curve(retrogress(run)) for run in runs]
    if flat(curves):
        return None
    figure = canvas(FULL_WIDTH, 2.8)
    ax = figure.subplots()
    ax.axhline(0, color=MUTED, linewidth=0.8)
    for place, curve in enumerate(curves):
        draw_curve(ax, curve, 100, **_line(place))
    ax.set_ylabel("Drop in balanced accuracy (points)")
    round_axis(ax)
    _legend(figure, labels)
    return figure


def class_recall(run: RunRecord) -> dict[str, float]:
    """Recall per class of the view a site is left with: pooled, else the mean over the sites that know it."""
    results = [result for result in run.results if result.view == run.end_view and result.recall]
    pooled = [result for result in results if result.scope == "pooled"]
    chosen = pooled or [result for result in results if result.scope == "site"] or results
    recalls = {name: mean([r.recall[place] for r in chosen]) for place, name in enumerate(run.start.classes)}
    return {name: value for name, value in recalls.items() if value is not None}


def rare_class_recall(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Recall per class, rarest class on top, a mark per run."""
    recalls = [class_recall(run) for run in runs]
    totals = dict(zip(runs[0].start.classes, np.sum([site.train for site in runs[0].start.sites], axis=0)))
    scored = [name for name in totals if any(name in each for each in recalls)]
    classes = sorted(scored, key=lambda name: totals[name])[:MOST_CLASSES]
    if not classes:
        return None
    figure = canvas(FULL_WIDTH, 0.9 + 0.3 * len(classes))
    ax = figure.subplots()
    ax.grid(axis="y", visible=False)
    for row, name in enumerate(classes):
        values = [100 * each[name] for each in recalls if name in each]
        ax.plot([min(values), max(values)], [row, row], color=FAINT, linewidth=2.5, zorder=1)
    for place, each in enumerate(recalls):
        points = [(100 * each[name], row) for row, name in enumerate(classes) if name in each]
        if points:
            ax.plot(*zip(*points), **_mark(place))
    ax.set_yticks(range(len(classes)), [f"{plain(name)}  (n = {totals[name]:,})" for name in classes])
    ax.set(xlabel="Recall (%)", xlim=(-2, 102), ylim=(len(classes) - 0.5, -0.5))
    ax.set_ylabel("Class, training images")
    _legend(figure, labels, marks=True)
    return figure


def _colour(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def _line(place: int) -> dict[str, Any]:
    """A line per run; when the colours are used up they come again with another dash."""
    dash = ("-", "--", ":")[place // len(PALETTE) % 3]
    return {"color": _colour(place), "linewidth": 1.5, "linestyle": dash}


def _mark(place: int) -> dict[str, Any]:
    look = {"marker": MARKERS[place % len(MARKERS)], "markersize": 6, "markeredgewidth": 0}
    return {"color": _colour(place), "linestyle": "none", **look}


def _legend(figure: Figure, labels: Sequence[str], *, marks: bool = False) -> None:
    look = _mark if marks else _line
    handles = [Line2D([], [], **look(place)) for place in range(len(labels))]
    _, columns = grid_shape(len(labels), 6)
    figure.legend(handles, [plain(label) for label in labels], loc="outside upper left", ncols=columns)
