"""The look of every figure, and its way into the page: restrained colours, thin lines, SVG with real text."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

FULL_WIDTH = 9.0
HALF_WIDTH = 4.4
INK = "#1d2430"
MUTED = "#6b7280"
FAINT = "#d5d9e0"
ABSENT = "#e7e8eb"
ACCENT = "#2b5f94"
ACCENT_LIGHT = "#a9c4de"
# Paul Tol's "muted" scheme: told apart under the common colour-vision deficiencies and on paper.
PALETTE = ("#332288", "#CC6677", "#117733", "#88CCEE", "#AA4499", "#999933", "#44AA99", "#882255", "#DDCC77")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
SHADES = LinearSegmentedColormap.from_list("shades", ["#f3f6fa", "#c9d9ea", "#6f9bc4", "#2b5f94", "#12305a"])
MOST_LINES = 40

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a site may be called "$1$"
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.4,
    "lines.solid_capstyle": "round",
}


@contextmanager
def style() -> Iterator[None]:
    """The house style, for the time it takes to draw and write figures."""
    # Names in any script are drawn by the reader's browser: a glyph that matplotlib lacks is no concern.
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def canvas(width: float, height: float) -> Figure:
    """An empty figure in inches, outside pyplot, so that nothing has to be closed."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def to_svg(figure: Figure, salt: str) -> str:
    """The figure as an `<svg>` element for an HTML page; `salt` keeps its ids apart from other figures'."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        # All metadata are dropped: a date would make the same run give another file.
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, count=2, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text, count=2)  # an HTML parser knows the namespaces
    return re.sub(r'<g id="[^"]*"', "<g", text)  # "axes_1" in every figure would repeat ids


def plain(name: str, most: int = 28) -> str:
    """A name on one line, shortened to `most` characters to fit a label."""
    name = " ".join(name.split())
    return name if len(name) <= most else name[: most - 1] + "…"


def grid_shape(count: int, most_columns: int) -> tuple[int, int]:
    """Rows and columns for `count` panels or legend entries, the last row as full as can be."""
    rows = -(-count // most_columns)
    return rows, -(-count // rows)


def lowest_panels(panels: np.ndarray, count: int) -> list[Axes]:
    """Of the first `count` panels those with none below, with tick labels shown; spare panels are hidden."""
    for ax in panels.flat[count:]:
        ax.set_visible(False)
    lowest = list(panels.flat[max(count - panels.shape[1], 0) : count])
    for ax in lowest:
        ax.tick_params(labelbottom=True)
    return lowest


def small_panels(titles: Sequence[str], label: str, most_columns: int, head: float, height: float) -> Any:
    """A figure of panels that share their axes, the horizontal one being rounds, with titles and labels.

    Heights are in inches: of the figure's head, and of a panel.
    """
    rows, columns = grid_shape(len(titles), most_columns)
    figure = canvas(FULL_WIDTH, head + height * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for ax, title in zip(panels.flat, titles):
        ax.set_title(plain(title))
    for ax in lowest_panels(panels, len(titles)):
        round_axis(ax)
    for ax in panels[:, 0]:
        ax.set_ylabel(label)
    return figure, list(panels.flat[: len(titles)])


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour per name, or grey for all of them when there are more names than colours."""
    return dict(zip(names, PALETTE)) if len(names) <= len(PALETTE) else dict.fromkeys(names, MUTED)


def draw_sites(
    ax: Axes, curves: pd.DataFrame, names: Sequence[str] = (), scale: float = 1, with_mean: bool = True
) -> None:
    """Thin lines per site, a column of `curves` each (a band when there are very many), under the mean over them.

    Colours are those of `names`, by default of the sites drawn.
    """
    several, colour = curves.shape[1] > 1, colours(names or list(curves))
    if curves.shape[1] > MOST_LINES:
        low, high = np.nanpercentile(scale * curves, [10, 90], axis=1)
        ax.fill_between(curves.index, low, high, color=FAINT, linewidth=0)
    else:
        for name, curve in curves.items():
            draw_curve(ax, curve, scale, color=colour.get(str(name), MUTED), linewidth=0.9 if several else 1.8)
    if with_mean and several:
        draw_curve(ax, curves.mean(axis=1), scale, color=INK, linewidth=2.2)
    round_axis(ax)


def draw_curve(ax: Axes, curve: pd.Series, scale: float = 1, **line: Any) -> None:
    """One curve over rounds; a lone point is drawn as a dot, since a line of one point is invisible."""
    known = scale * curve.dropna()
    marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(known) == 1 else {}
    ax.plot(known.index, known, **marker, **line)


def round_axis(ax: Axes) -> None:
    """Label the horizontal axis with whole rounds."""
    ax.set_xlabel("Round")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def site_legend(figure: Figure, names: Sequence[str], with_mean: bool = True) -> None:
    """One legend above the panels: a line per site, or one for all when they are many, and the mean over several."""
    if len(names) > MOST_LINES:
        entries = [(f"{len(names)} sites, 10th to 90th percentile", FAINT, 6.0)]
    elif len(names) > len(PALETTE):
        entries = [(f"each of {len(names)} sites", MUTED, 0.9)]
    else:
        entries = [(plain(name), colour, 1.2) for name, colour in colours(names).items()]
    if with_mean and len(names) > 1:
        entries.append(("mean over sites", INK, 2.2))
    handles = [Line2D([], [], color=shade, linewidth=width) for _, shade, width in entries]
    _, columns = grid_shape(len(entries), 6 if figure.get_figwidth() > HALF_WIDTH else 3)
    figure.legend(handles, [text for text, _, _ in entries], loc="outside upper left", ncols=columns)
