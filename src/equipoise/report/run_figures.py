"""The figures of one run: what was learnt, by round and by class, who held which data, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from equipoise.metrics import METRICS
from equipoise.report import plotting as plot
from equipoise.report.curves import flat, metric_curves, retrogress, work_curves
from equipoise.report.record import RunRecord
from equipoise.report.run_tables import SCOPE_TITLES
from equipoise.report.wording import byte_unit

MOST_ROWS = 30
MOST_PANELS = 9


def learning_curves(run: RunRecord) -> Figure | None:
    """Validation metrics against rounds, a row of panels per view, a line per site and one for the mean."""
    metrics = [metric for metric in METRICS if metric.in_curves]
    views = [view for view in ("global", "personal") if not metric_curves(run, metrics[0].name, view).empty]
    if not views:
        return None
    figure = plot.canvas(plot.FULL_WIDTH, 0.45 + 2.35 * len(views))
    panels = figure.subplots(len(views), len(metrics), squeeze=False, sharex=True)
    names = list(run.evaluations["site"][run.evaluations["part"] == "valid"].unique())
    for row, view in zip(panels, views):
        for ax, metric in zip(row, metrics):
            _mark_selected(ax, run, view)
            plot.draw_sites(ax, metric_curves(run, metric.name, view), names, metric.scale)
            ax.set_ylabel(metric.title + (" (%)" if metric.scale == 100 else ""))
        row[0].set_title(f"{view.capitalize()} view")
    for ax in panels[:-1].flat:
        ax.set_xlabel("")
    plot.site_legend(figure, names)
    return figure


def _mark_selected(ax: Axes, run: RunRecord, view: str) -> None:
    chosen = [s.rounds for s in run.selections if s.view == view and s.rule == "best"]
    for number in set().union(*chosen):
        ax.axvline(number, color=plot.MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0.5)


def retrogress_curves(run: RunRecord) -> Figure | None:
    """Drop of the first metric after each communication, per site and as the mean; None where all are zero."""
    drops = 100 * retrogress(run)
    figure = None if flat(drops) else _half_width(drops, f"Drop in {METRICS[0].title.lower()} (points)")
    if figure:
        figure.axes[0].axhline(0, color=plot.MUTED, linewidth=0.8, zorder=1.9)
    return figure


def training_loss(run: RunRecord) -> Figure | None:
    """Mean training loss per site and round."""
    return _half_width(work_curves(run, "loss"), "Training loss")


def time_per_round(run: RunRecord) -> Figure | None:
    """Seconds per round, by site and on the clock."""
    figure = _half_width(work_curves(run, "seconds"), "Seconds per round", with_mean=False)
    if figure:
        wall = pd.Series({finished.round: finished.seconds for finished in run.rounds})
        plot.draw_curve(figure.axes[0], wall, color=plot.INK, linewidth=1.6, linestyle=(0, (4, 2)))
        figure.axes[0].set_ylim(bottom=0)
    return figure


def _half_width(curves: pd.DataFrame, label: str, with_mean: bool = True) -> Figure | None:
    if curves.empty:
        return None
    figure = plot.canvas(plot.HALF_WIDTH, 2.9)
    ax = figure.subplots()
    plot.draw_sites(ax, curves, with_mean=with_mean)
    ax.set_ylabel(label)
    plot.site_legend(figure, list(curves), with_mean)
    return figure


def federation_bubbles(run: RunRecord) -> Figure | None:
    """Training images per site and class: a bubble's area is the count; sums stand beside and below."""
    shown = _largest(run.training_images)
    if shown.empty:
        return None
    counts = shown.to_numpy()
    height, width = counts.shape
    figure = plot.canvas(min(plot.FULL_WIDTH, 2.6 + 0.85 * width), 0.9 + 0.46 * height)
    ax = figure.subplots()
    ax.grid(False)
    diameters = 25 * np.sqrt(counts / max(counts.max(), 1))  # points
    rows, columns = np.nonzero(counts)
    ax.scatter(columns, rows, s=diameters[rows, columns] ** 2, color=plot.ACCENT, linewidth=0)
    for (row, column), count in np.ndenumerate(counts):
        _bubble_text(ax, row, column, count, diameters[row, column])
    sums = {(width + 0.15, row): total for row, total in enumerate(counts.sum(axis=1))}
    sums |= {(column, height - 0.1): total for column, total in enumerate(counts.sum(axis=0))}
    for (x, y), total in {**sums, (width + 0.15, height - 0.1): counts.sum()}.items():
        ax.text(x, y, f"{total:,}", ha="center", va="center", weight="bold")
    ax.axhline(height - 0.5, color=plot.FAINT, linewidth=0.8)
    ax.axvline(width - 0.3, color=plot.FAINT, linewidth=0.8)
    names = [plot.plain(name) for name in shown]
    ax.set_xticks([*range(width), width + 0.15], [*names, "all"])
    ax.set_yticks([*range(height), height - 0.1], [*(plot.plain(name) for name in shown.index), "all"])
    ax.set(xlim=(-0.6, width + 0.6), ylim=(height + 0.3, -0.6), xlabel="Class", ylabel="Site")
    _slant_long_labels(ax, names)
    _frameless(ax)
    return figure


def _bubble_text(ax: Axes, row: int, column: int, count: int, diameter: float) -> None:
    """The count inside its bubble where it fits, else to the right of it."""
    text, size = f"{count:,}", 7.5
    # A digit is about 0.65 of the font's size wide and 0.75 high; the corners of the text have to fit, too.
    inside = diameter > np.hypot(0.65 * size * len(text), 0.75 * size) + 1
    shift = diameter / 2 + 2 if count and not inside else 0
    look: dict[str, Any] = {"ha": "left" if shift else "center", "va": "center", "fontsize": size}
    colour = "white" if inside else plot.INK if count else plot.MUTED
    ax.annotate(text, (column, row), (shift, 0), textcoords="offset points", color=colour, **look)


def recall_map(run: RunRecord) -> Figure | None:
    """Recall per class at every site and over all, a panel per view; grey where a class is absent."""
    shown = {view: own for view in ("global", "personal") if len(own := _with_recall(run, view))}
    if not shown:
        return None
    classes = run.start.classes
    beside = len(shown) > 1 and len(classes) <= 6
    heights = [0.28 * len(own) for own in shown.values()]
    height = max(heights) + 1.0 if beside else sum(heights) + 1.0 * len(shown)
    width = plot.FULL_WIDTH if beside else min(plot.FULL_WIDTH, 2.4 + 0.75 * len(classes))
    shape = {"ncols": len(shown)} if beside else {"nrows": len(shown), "height_ratios": heights}
    figure = plot.canvas(width, height)
    panels = figure.subplots(squeeze=False, sharex=True, **shape)
    for ax, (view, own) in zip(panels.flat, shown.items()):
        recall = 100 * np.array(own["recall"].tolist(), dtype=float)
        _heat(ax, recall, np.where(np.isnan(recall), "–", np.char.mod("%.0f", recall)))
        ax.set_xticks(np.arange(len(classes)) + 0.5, [plot.plain(name) for name in classes])
        ax.set_yticks(np.arange(len(own)) + 0.5, _places(own))
        ax.set_title(f"{view.capitalize()} view: recall (%)")
        _slant_long_labels(ax, classes, room=2 if beside else 1)
    for ax in panels[-1]:
        ax.set_xlabel("Class")
    return figure


def confusion_matrices(run: RunRecord) -> Figure | None:
    """Confusion of the view a site is left with: pooled, then by site; shaded by share of the true class."""
    shown = _with_confusion(run)[:MOST_PANELS]
    if not len(shown):
        return None
    classes = [plot.plain(name, most=16) for name in run.start.classes]
    rows, columns = plot.grid_shape(len(shown), 4 if len(classes) <= 4 else 3 if len(classes) <= 9 else 2)
    size = rows * (0.35 + max(1.5, 0.24 * len(classes))) + 0.3 + 0.06 * max(map(len, classes))
    figure = plot.canvas(plot.FULL_WIDTH * columns / max(columns, 2), size)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for place, (ax, title, matrix) in enumerate(zip(panels.flat, _places(shown), shown["confusion"])):
        counts = np.array(matrix)
        totals = counts.sum(axis=1, keepdims=True)
        share = 100 * counts / np.where(totals, totals, np.nan)
        whole = (counts == counts.round()).all()  # a mean over rounds may not be
        _heat(ax, share, np.char.mod("%.0f" if whole else "%.1f", counts), size=np.clip(60 / len(classes), 5, 8))
        ax.set_title(f"{title} (n = {counts.sum():,.0f})")
        ax.set_xticks(np.arange(len(classes)) + 0.5, classes)
        ax.set_yticks(np.arange(len(classes)) + 0.5, classes)
        if place % columns == 0:
            ax.set_ylabel("True class")
    for ax in plot.lowest_panels(panels, len(shown)):
        ax.set_xlabel("Predicted class")
        _slant_long_labels(ax, classes, room=columns)
    return figure


def _with_recall(run: RunRecord, view: str) -> pd.DataFrame:
    """The results of a view that have recall, sites first; the largest sites when there are very many."""
    kept = ["", *_largest(run.images["train"]).index]
    rows = run.results[(run.results["view"] == view) & (run.results["recall"].str.len() > 0)]
    rows = _without_repeats(rows, ["site", "cohort", "mean", "pooled"])
    return rows[rows["site"].isin(kept)]


def _with_confusion(run: RunRecord) -> pd.DataFrame:
    """The confusion matrices of the view a site is left with, those over all sites first."""
    rows = run.results[(run.results["view"] == run.end_view) & run.results["confusion"].notna()]
    return _without_repeats(rows, ["pooled", "cohort", "site"])


def _without_repeats(rows: pd.DataFrame, scopes: Sequence[str]) -> pd.DataFrame:
    """The results of these scopes, in their order; of a single site no mean and no pool, which only repeat it."""
    rows = rows[rows["scope"].isin(scopes)]
    if (rows["scope"] == "site").sum() == 1:
        rows = rows[rows["site"] != ""]
    return rows.sort_values("scope", key=lambda scope: scope.map(scopes.index), kind="stable")


def sites_shown(run: RunRecord) -> str:
    """A sentence for the caption when there are more sites than a figure can show."""
    count = len(run.training_images)
    if count <= MOST_ROWS:
        return ""
    return f" Of {count} sites, the {MOST_ROWS} with the most training images are shown."


def matrices_shown(run: RunRecord) -> str:
    """Sentences for the caption when matrices are means over rounds, or there are more than a figure can show."""
    rows = _with_confusion(run)
    left_out = f" The first {MOST_PANELS} of {len(rows)} are shown." if len(rows) > MOST_PANELS else ""
    numbers = sorted({*rows["rounds"][rows["scope"] != "cohort"]})
    if not numbers or numbers[-1] == 1:
        return left_out
    cohorts = "; those of cohorts are of the last" if (rows["scope"] == "cohort").any() else ""
    return f" Each number is the mean over {'up to ' * (len(numbers) > 1)}{numbers[-1]} rounds{cohorts}.{left_out}"


def traffic_per_round(run: RunRecord) -> Figure | None:
    """What each site sends and receives per round; None where nothing moved."""
    means = run.work.groupby("site")[["sent", "received"]].mean()
    means = means.loc[[name for name in _largest(run.images["train"]).index if name in means.index]]
    if not means.any(axis=None):
        return None
    figure = plot.canvas(plot.HALF_WIDTH, max(2.9, 0.9 + 0.3 * len(means)))
    ax = figure.subplots()
    divisor, unit = byte_unit(means.max(axis=None))
    places = np.arange(len(means))
    ax.barh(places - 0.18, means["sent"] / divisor, 0.32, color=plot.ACCENT, label="sent by the site")
    ax.barh(places + 0.18, means["received"] / divisor, 0.32, color=plot.ACCENT_LIGHT, label="received by the site")
    ax.set_yticks(places, [plot.plain(name) for name in means.index])
    ax.set(xlabel=f"{unit} per round", ylim=(len(means) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def _slant_long_labels(ax: Axes, names: Sequence[str], room: int = 1) -> None:
    """Turn the labels of the horizontal axis when they would collide; `room`: panels side by side."""
    if (max(map(len, names), default=0) + 2) * len(names) * room > 120:
        for label in ax.get_xticklabels():
            label.set(rotation=40, ha="right", rotation_mode="anchor")


def _largest(images: pd.DataFrame) -> pd.DataFrame:
    """At most MOST_ROWS sites, those with the most images, in their own order."""
    return images[images.sum(axis=1).rank(method="first", ascending=False) <= MOST_ROWS]


def _heat(ax: Axes, values: np.ndarray, texts: np.ndarray, size: float = 8) -> None:
    """A table of cells shaded from 0 to 100 with a text in each; cells without a value stay grey."""
    ax.set_facecolor(plot.ABSENT)
    ax.grid(False)
    shaded = np.ma.masked_invalid(values)
    ax.pcolormesh(shaded, cmap=plot.SHADES, vmin=0, vmax=100, edgecolors="white", linewidth=0.8)
    for (row, column), text in np.ndenumerate(texts):
        value = values[row, column]
        shade = plot.MUTED if np.isnan(value) or not value else "white" if value > 55 else plot.INK
        ax.text(column + 0.5, row + 0.5, str(text), ha="center", va="center", fontsize=size, color=shade)
    ax.set_ylim(len(values), 0)  # the first row on top
    _frameless(ax)


def _places(rows: pd.DataFrame) -> list[str]:
    """The site of each result, or its scope in words."""
    return [plot.plain(site or SCOPE_TITLES[scope]) for site, scope in zip(rows["site"], rows["scope"])]


def _frameless(ax: Axes) -> None:
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
