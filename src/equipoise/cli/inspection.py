"""Shows what a federation holds: a site x class table for the terminal, and a bubble chart."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from equipoise.core.errors import UserError
from equipoise.data.federation import Federation
from equipoise.data.splits import PARTS

CHART_FORMATS = (".png", ".svg", ".pdf", ".jpg", ".webp")
_TRAIN, _OTHER, _INK, _FAINT = "#2a6f97", "#b8a07e", "#22313f", "#b9c0c7"
_MOST_NUMBERED = 24  # sites; with more of them numbers would overlap


def table(federation: Federation) -> Table:
    """Images of each class at each site, part by part; where images have masks, images and pixels of each structure.

    Names are `Text`, not markup: a class may be called "[red]".
    """
    rows = []
    masked = federation.task == "segmentation"
    for site in federation.places():
        parts = [part for part in PARTS if part in site.splits]
        for part in parts:
            counts = site.class_counts(len(federation.classes), part)
            every = len(site.splits[part]) if masked else counts.sum()
            numbers = [f"{count:,}" if count else "-" for count in (*counts, every)]
            rows.append((site.name if part == parts[0] else "", part, *numbers))
    title = Text(f"{federation.name}: {_unit(federation)} by site, part and class", style="table.title")
    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column, name in enumerate(("site", "part", *federation.classes, "images" if masked else "all")):
        widest = max(len(row[column]) for row in rows)  # a narrow terminal folds headings, never numbers
        shown.add_column(Text(name), justify="right" if column > 1 else "left", min_width=widest, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown


def _unit(federation: Federation) -> str:
    """What is counted of each class."""
    return "pixels" if federation.task == "segmentation" else "images"


def bubble_chart(federation: Federation, path: Path) -> None:
    """Draw site x class as bubbles whose area is the number of images (or pixels), with totals at the margins.

    Training images are shown where a site trains, test images (in another colour) where it only tests.

    Raises:
        UserError: when the ending of `path` is none of CHART_FORMATS
    """
    if path.suffix.lower() not in CHART_FORMATS:
        raise UserError(f"{path}: a chart's file name ends in one of {', '.join(CHART_FORMATS)}")
    sites = federation.places()
    parts = [next(part for part in ("train", "test", "valid") if part in site.splits) for site in sites]
    num_classes = len(federation.classes)
    counts = np.stack([site.class_counts(num_classes, part) for site, part in zip(sites, parts)], axis=1)
    trains = np.array([part == "train" for part in parts])
    figure = Figure(figsize=(min(3.6 + 0.85 * len(sites), 22), 2.6 + 0.62 * num_classes), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(max(len(sites), 4), 1.6), height_ratios=(1.1, num_classes))
    main = figure.add_subplot(grid[1, 0])
    top = figure.add_subplot(grid[0, 0], sharex=main)
    right = figure.add_subplot(grid[1, 1], sharey=main)
    _bubbles(main, counts, trains)
    main.set_xticks(range(len(sites)), [site.name for site in sites])
    if len(sites) > _MOST_NUMBERED:
        main.tick_params(axis="x", rotation=90)
    elif max(len(site.name) for site in sites) > 12:
        main.tick_params(axis="x", rotation=30)
    main.set_yticks(range(num_classes), federation.classes)
    main.set_ylim(num_classes - 0.4, -0.6)
    main.set_xlim(-0.6, len(sites) - 0.4)
    unit = _unit(federation)
    _margins(top, right, counts, trains, unit)
    if not trains.all():
        colours = {f"training {unit}": _TRAIN, f"test {unit}": _OTHER}
        handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
        figure.legend(handles=handles, loc="upper right", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(f"{federation.name}: {unit} by site and class", x=0.02, ha="left", color=_INK, fontsize=12)
    figure.savefig(path, dpi=150, facecolor="white")


def _bubbles(axes: Axes, counts: np.ndarray, trains: np.ndarray) -> None:
    """Bubbles of `counts` (C, S), blue where a site trains; classes that a site lacks are crossed."""
    largest, numbered = counts.max(), counts.shape[1] <= _MOST_NUMBERED
    for (label, site), count in np.ndenumerate(counts):
        if count == 0:
            axes.plot(site, label, marker="x", color=_FAINT, markersize=4)
            continue
        area = 1150 * count / largest
        colour = _TRAIN if trains[site] else _OTHER
        axes.scatter(site, label, s=area, color=colour, alpha=0.85, edgecolors="white", linewidths=0.6)
        if numbered:
            inside = area > 420
            offset = (0, 0) if inside else (0, 2 + np.sqrt(area / np.pi))
            axes.annotate(
                f"{count:,}", (site, label), offset, textcoords="offset points", fontsize=7.5, ha="center",
                va="center" if inside else "bottom", color="white" if inside else _INK,
            )  # fmt: skip
    axes.grid(color="#eef1f4", linewidth=0.8)
    axes.set_axisbelow(True)
    _plain(axes)


def _margins(top: Axes, right: Axes, counts: np.ndarray, trains: np.ndarray, unit: str) -> None:
    """Totals of each site above the bubbles, and of each class's training images beside them."""
    totals, classes = counts.sum(axis=0), counts[:, trains].sum(axis=1)
    top.bar(range(len(totals)), totals, width=0.55, color=[_TRAIN if train else _OTHER for train in trains])
    right.barh(range(len(classes)), classes, height=0.5, color=_TRAIN)
    if len(totals) <= _MOST_NUMBERED:
        for site, total in enumerate(totals):
            top.annotate(f"{total:,}", (site, total), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    for label, total in enumerate(classes):
        right.annotate(f"{total:,}", (total, label), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
    top.set_ylim(0, totals.max() * 1.35)
    right.set_xlim(0, classes.max() * 1.45)
    right.set_title(f"training {unit}", fontsize=8, color=_INK)
    for axes in (top, right):
        _plain(axes)
        axes.tick_params(labelbottom=False, labelleft=False)


def _plain(axes: Axes) -> None:
    """No frame and no tick marks."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9, labelcolor=_INK)
