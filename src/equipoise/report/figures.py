"""The figures of one run: what was learnt, by round and by class, who held which data, and what it cost."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from equipoise.report.curves import Curve, flat, metric_curves, retrogress, work_curves
from equipoise.report.events import Result, SiteCounts, View
from equipoise.report.plotting import (
    ABSENT,
    ACCENT,
    ACCENT_LIGHT,
    FAINT,
    FULL_WIDTH,
    HALF_WIDTH,
    INK,
    MUTED,
    SHADES,
    canvas,
    colours,
    draw_curve,
    draw_sites,
    grid_shape,
    lowest_panels,
    plain,
    round_axis,
    site_legend,
)
from equipoise.report.record import RunRecord
from equipoise.report.summary import byte_unit
from equipoise.report.tables import METRIC_TITLES, SCOPE_TITLES

MOST_ROWS = 30
MOST_PANELS = 9
LEARNING_METRICS = ("balanced_accuracy", "macro_f1", "loss")


def learning_curves(run: RunRecord) -> Figure | None:
    """Validation metrics against rounds, a row of panels per view, a line per site and one for the mean."""
    views: list[View] = [v for v in ("global", "personal") if metric_curves(run, "balanced_accuracy", v)]
    if not views:
        return None
    figure = canvas(FULL_WIDTH, 0.45 + 2.35 * len(views))
    panels = figure.subplots(len(views), len(LEARNING_METRICS), squeeze=False, sharex=True)
    names = list(dict.fromkeys(e.site for e in run.evaluations if e.part == "valid"))
    colour = colours(names)
    for row, view in zip(panels, views):
        for ax, metric in zip(row, LEARNING_METRICS):
            curves = metric_curves(run, metric, view)
            _mark_selected(ax, run, view)
            draw_sites(ax, curves, colour, scale=1 if metric == "loss" else 100)
            ax.set_ylabel(METRIC_TITLES[metric] + ("" if metric == "loss" else " (%)"))
        row[0].set_title(f"{view.capitalize()} view")
    for ax in panels[:-1].flat:
        ax.set_xlabel("")
    site_legend(figure, names, colour, with_mean=len(names) > 1)
    return figure


def _mark_selected(ax: Axes, run: RunRecord, view: str) -> None:
    chosen = [s.rounds for s in run.selections if s.view == view and s.rule == "best"]
    for number in set().union(*chosen):
        ax.axvline(number, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0.5)


def retrogress_curves(run: RunRecord) -> Figure | None:
    """Drop in balanced accuracy after each communication, per site and as the mean; None where all are zero."""
    drops = retrogress(run)
    shown = {} if flat(drops.values()) else drops
    return _half_width(shown, "Drop in balanced accuracy (points)", scale=100, zero=True)


def training_loss(run: RunRecord) -> Figure | None:
    """Mean training loss per site and round."""
    return _half_width(work_curves(run, "loss"), "Training loss")


def _half_width(curves: dict[str, Curve], label: str, scale: float = 1, zero: bool = False) -> Figure | None:
    if not curves:
        return None
    figure = canvas(HALF_WIDTH, 2.9)
    ax = figure.subplots()
    if zero:
        ax.axhline(0, color=MUTED, linewidth=0.8)
    colour = colours(list(curves))
    draw_sites(ax, curves, colour, scale=scale)
    ax.set_ylabel(label)
    site_legend(figure, list(curves), colour, with_mean=len(curves) > 1)
    return figure


def federation_bubbles(sites: Sequence[SiteCounts], classes: Sequence[str]) -> Figure | None:
    """Training images per site and class: a bubble's area is the count; sums stand beside and below."""
    if not sites:
        return None
    shown = _largest(sites)
    counts = np.array([site.train for site in shown])
    height, width = counts.shape
    figure = canvas(min(FULL_WIDTH, 2.6 + 0.85 * width), 0.9 + 0.46 * height)
    ax = figure.subplots()
    ax.grid(False)
    diameters = 25 * np.sqrt(counts / max(counts.max(), 1))  # points
    rows, columns = np.nonzero(counts)
    ax.scatter(columns, rows, s=diameters[rows, columns] ** 2, color=ACCENT, linewidth=0)
    for (row, column), count in np.ndenumerate(counts):
        _bubble_text(ax, row, column, count, diameters[row, column])
    for row, total in enumerate(counts.sum(axis=1)):
        ax.text(width + 0.15, row, f"{total:,}", ha="center", va="center", weight="bold")
    for column, total in enumerate(counts.sum(axis=0)):
        ax.text(column, height - 0.1, f"{total:,}", ha="center", va="center", weight="bold")
    ax.text(width + 0.15, height - 0.1, f"{counts.sum():,}", ha="center", va="center", weight="bold")
    ax.axhline(height - 0.5, color=FAINT, linewidth=0.8)
    ax.axvline(width - 0.3, color=FAINT, linewidth=0.8)
    names = [plain(name) for name in classes]
    ax.set_xticks([*range(width), width + 0.15], [*names, "all"])
    ax.set_yticks([*range(height), height - 0.1], [*(plain(site.name) for site in shown), "all"])
    ax.set(xlim=(-0.6, width + 0.6), ylim=(height + 0.3, -0.6), xlabel="Class", ylabel="Site")
    slant_long_labels(ax, names)
    _frameless(ax)
    return figure


def _bubble_text(ax: Axes, row: int, column: int, count: int, diameter: float) -> None:
    """The count inside its bubble where it fits, else to the right of it."""
    text, size = f"{count:,}", 7.5
    # A digit is about 0.65 of the font's size wide and 0.75 high; the corners of the text have to fit, too.
    inside = diameter > np.hypot(0.65 * size * len(text), 0.75 * size) + 1
    shift = diameter / 2 + 2 if count and not inside else 0
    ax.annotate(
        text,
        (column, row),
        (shift, 0),
        textcoords="offset points",
        ha="left" if shift else "center",
        va="center",
        fontsize=size,
        color="white" if inside else INK if count else MUTED,
    )


def recall_map(run: RunRecord) -> Figure | None:
    """Recall per class at every site and over all, a panel per view; grey where a class is absent."""
    views = [v for v in ("global", "personal") if _with_recall(run, v)]
    if not views:
        return None
    classes = run.start.classes
    beside = len(views) > 1 and len(classes) <= 6
    heights = [0.28 * len(_with_recall(run, view)) for view in views]
    height = max(heights) + 1.0 if beside else sum(heights) + 1.0 * len(views)
    figure = canvas(FULL_WIDTH if beside else min(FULL_WIDTH, 2.4 + 0.75 * len(classes)), height)
    shape = {"ncols": len(views)} if beside else {"nrows": len(views), "height_ratios": heights}
    panels = figure.subplots(squeeze=False, sharex=True, **shape)
    for ax, view in zip(panels.flat, views):
        results = _with_recall(run, view)
        recall = np.array([[np.nan if value is None else 100 * value for value in r.recall] for r in results])
        _heat(ax, recall, np.where(np.isnan(recall), "–", np.char.mod("%.0f", recall)))
        ax.set_xticks(np.arange(len(classes)) + 0.5, [plain(name) for name in classes])
        ax.set_yticks(np.arange(len(results)) + 0.5, [_place(result) for result in results])
        ax.set_title(f"{view.capitalize()} view: recall (%)")
        slant_long_labels(ax, classes, room=2 if beside else 1)
    for ax in panels[-1]:
        ax.set_xlabel("Class")
    return figure


def _with_recall(run: RunRecord, view: str) -> list[Result]:
    """The results that have recall, sites first; the largest sites when there are very many."""
    kept = {site.name for site in _largest(run.start.sites)}
    order = {"site": 0, "cohort": 1, "mean": 2, "pooled": 3}
    results = [r for r in run.results if r.view == view and r.recall]
    if sum(r.scope == "site" for r in results) == 1:  # its mean and pool would only repeat it
        results = [r for r in results if r.site is not None]
    results = [r for r in results if r.site is None or r.site in kept]
    return sorted(results, key=lambda result: order[result.scope])


def confusion_matrices(run: RunRecord) -> Figure | None:
    """Confusion of the view a site is left with: pooled, then by site; shaded by share of the true class."""
    results = _with_confusion(run)[:MOST_PANELS]
    if not results:
        return None
    classes = [plain(name, most=16) for name in run.start.classes]
    rows, columns = grid_shape(len(results), 4 if len(classes) <= 4 else 3 if len(classes) <= 9 else 2)
    size = rows * (0.35 + max(1.5, 0.24 * len(classes))) + 0.3 + 0.06 * max(map(len, classes))
    figure = canvas(FULL_WIDTH * columns / max(columns, 2), size)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for place, (ax, result) in enumerate(zip(panels.flat, results)):
        counts = np.array(result.confusion)
        totals = counts.sum(axis=1, keepdims=True)
        share = 100 * counts / np.where(totals, totals, np.nan)
        whole = (counts == counts.round()).all()  # a mean over rounds may not be
        _heat(ax, share, np.char.mod("%.0f" if whole else "%.1f", counts), size=np.clip(60 / len(classes), 5, 8))
        ax.set_title(f"{_place(result)} (n = {counts.sum():,.0f})")
        ax.set_xticks(np.arange(len(classes)) + 0.5, classes)
        ax.set_yticks(np.arange(len(classes)) + 0.5, classes)
        if place % columns == 0:
            ax.set_ylabel("True class")
    for ax in lowest_panels(panels, len(results)):
        ax.set_xlabel("Predicted class")
        slant_long_labels(ax, classes, room=columns)
    return figure


def _with_confusion(run: RunRecord) -> list[Result]:
    """The confusion matrices of the view a site is left with, those over all sites first."""
    order = {"pooled": 0, "cohort": 1, "site": 2}
    results = [r for r in run.results if r.view == run.end_view and r.confusion and r.scope in order]
    if sum(r.scope == "site" for r in results) == 1:  # its pool would only repeat it
        results = [r for r in results if r.site is not None]
    return sorted(results, key=lambda result: order[result.scope])


def sites_shown(run: RunRecord) -> str:
    """A sentence for the caption when there are more sites than a figure can show."""
    count = len(run.training_sites)
    if count <= MOST_ROWS:
        return ""
    return f" Of {count} sites, the {MOST_ROWS} with the most training images are shown."


def matrices_shown(run: RunRecord) -> str:
    """Sentences for the caption when matrices are means over rounds, or there are more than a figure can show."""
    results = _with_confusion(run)
    left_out = f" The first {MOST_PANELS} of {len(results)} are shown." if len(results) > MOST_PANELS else ""
    return _mean_of_rounds(results) + left_out


def _mean_of_rounds(results: Sequence[Result]) -> str:
    """Over how many rounds confusion matrices are means, in a sentence; nothing where they are of one."""
    cohorts = any(result.scope == "cohort" for result in results)
    numbers = sorted({result.rounds for result in results if result.scope != "cohort"})
    if not numbers or numbers[-1] == 1:
        return ""
    count = f"{'up to ' if len(numbers) > 1 else ''}{numbers[-1]}"
    return f" Each number is the mean over {count} rounds{'; those of cohorts are of the last' if cohorts else ''}."


def time_per_round(run: RunRecord) -> Figure | None:
    """Seconds per round, by site and on the clock."""
    curves = work_curves(run, "seconds")
    if not curves:
        return None
    figure = canvas(HALF_WIDTH, 2.9)
    ax = figure.subplots()
    colour = colours(list(curves))
    draw_sites(ax, curves, colour, with_mean=False)
    wall = {finished.round: finished.seconds for finished in run.rounds}
    draw_curve(ax, wall, color=INK, linewidth=1.6, linestyle=(0, (4, 2)))
    round_axis(ax)
    ax.set_ylabel("Seconds per round")
    ax.set_ylim(bottom=0)
    site_legend(figure, list(curves), colour, with_mean=False)
    return figure


def traffic_per_round(run: RunRecord) -> Figure | None:
    """What each site sends and receives per round; None where nothing moved."""
    work = {site.name: [r.sites[site.name] for r in run.rounds if site.name in r.sites] for site in run.start.sites}
    names = [site.name for site in _largest(run.start.sites) if work[site.name]]
    sent = np.array([np.mean([w.sent for w in work[name]]) for name in names])
    received = np.array([np.mean([w.received for w in work[name]]) for name in names])
    if not (sent.any() or received.any()):
        return None
    figure = canvas(HALF_WIDTH, max(2.9, 0.9 + 0.3 * len(names)))
    ax = figure.subplots()
    divisor, unit = byte_unit(max(sent.max(), received.max()))
    places = np.arange(len(names))
    ax.barh(places - 0.18, sent / divisor, 0.32, color=ACCENT, label="sent by the site")
    ax.barh(places + 0.18, received / divisor, 0.32, color=ACCENT_LIGHT, label="received by the site")
    ax.set_yticks(places, [plain(name) for name in names])
    ax.set(xlabel=f"{unit} per round", ylim=(len(names) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def slant_long_labels(ax: Axes, names: Sequence[str], room: int = 1) -> None:
    """Turn the labels of the horizontal axis when they would collide; `room`: panels side by side."""
    if (max(map(len, names), default=0) + 2) * len(names) * room > 120:
        for label in ax.get_xticklabels():
            label.set(rotation=40, ha="right", rotation_mode="anchor")


def _largest(sites: Sequence[SiteCounts]) -> list[SiteCounts]:
    """At most MOST_ROWS sites, those with the most training images, in their own order."""
    kept = sorted(range(len(sites)), key=lambda place: -sum(sites[place].train))[:MOST_ROWS]
    return [sites[place] for place in sorted(kept)]


def _heat(ax: Axes, values: np.ndarray, texts: np.ndarray, size: float = 8) -> None:
    """A table of cells shaded from 0 to 100 with a text in each; cells without a value stay grey."""
    ax.set_facecolor(ABSENT)
    ax.grid(False)
    shaded = np.ma.masked_invalid(values)
    ax.pcolormesh(shaded, cmap=SHADES, vmin=0, vmax=100, edgecolors="white", linewidth=0.8)
    for (row, column), text in np.ndenumerate(texts):
        value = values[row, column]
        shade = MUTED if np.isnan(value) or not value else "white" if value > 55 else INK
        ax.text(column + 0.5, row + 0.5, str(text), ha="center", va="center", fontsize=size, color=shade)
    ax.set_ylim(len(values), 0)  # the first row on top
    _frameless(ax)


def _place(result: Result) -> str:
    return plain(result.site or SCOPE_TITLES[result.scope])


def _frameless(ax: Axes) -> None:
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
