"""Figures as plain data: panels of Plotly traces, which the page's script draws in the reader's colours.

A colour is the name of a CSS variable after a `$`, so figures follow the page into dark mode and onto paper.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from equipoise.core.errors import UserError

INK, MUTED, FAINT, ACCENT, SOFT, SECOND = "$ink", "$muted", "$faint", "$accent", "$soft", "$second"
#: Paul Tol's "muted" scheme in the style sheet: told apart under the common colour-vision deficiencies
PALETTE = tuple(f"$c{place}" for place in range(9))
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "x", "star", "hexagon", "triangle-down")
SHADES = [[place / 4, f"$shade{place}"] for place in range(5)]
#: lines of sites in one panel; above this they become a band
MOST_LINES = 40
#: fewer rounds than this have a tick each
FEW_ROUNDS = 8
#: cells of a heat map that have room for a number
MOST_NUMBERED = 400

Trace = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One plot: traces, and what Plotly's layout has beyond the page's own; `height` in pixels."""

    traces: Sequence[Trace]
    x: Mapping[str, Any] = field(default_factory=dict)
    y: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    height: int = 260
    shapes: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[Mapping[str, Any]] = ()

    @property
    def plain(self) -> dict[str, Any]:
        """The panel as the page's script reads it."""
        x = dict(self.x)
        if "tickformat" in x and max((max(trace["x"], default=0) for trace in self.traces), default=0) < FEW_ROUNDS:
            x["dtick"] = 1  # of few rounds, ticks would fall between them
        layout = {"xaxis": _axis(x), "yaxis": _axis(self.y), "shapes": [*self.shapes]}
        layout |= {"annotations": [{"showarrow": False, **note} for note in self.notes]}
        return {"title": self.title, "height": self.height, "data": [*self.traces], "layout": layout}


@dataclass(frozen=True)
class Figure:
    """Panels side by side, as many as the reader's screen has room for; or several pages of them to choose from."""

    pages: Mapping[str, Sequence[Panel]]
    choose: str = ""
    """What stands before the choice of a page."""
    least: int = 260
    """The narrowest that a panel may be, in pixels."""
    name: str = ""
    caption: str = ""

    @property
    def height(self) -> int:
        """The height of the first page's first panel: room that the page keeps before it is drawn."""
        return max(panel.height for panel in next(iter(self.pages.values())))

    @property
    def json(self) -> str:
        """The figure for a script element."""
        pages = [{"label": label, "panels": [panel.plain for panel in own]} for label, own in self.pages.items()]
        text = json.dumps({"pages": pages, "choose": self.choose, "least": self.least}, separators=(",", ":"))
        return text.replace("<", "\\u003c")


def figure(panels: Sequence[Panel], name: str = "", caption: str = "", least: int = 260) -> Figure | None:
    """A figure of one page; None without panels."""
    return Figure({"": panels}, "", least, name, caption) if panels else None


def paged(
    label: str, pages: Mapping[str, Sequence[Panel]], name: str = "", caption: str = "", least: int = 260
) -> Figure | None:
    """A figure whose pages the reader chooses by name; None without any."""
    return Figure(pages, label if len(pages) > 1 else "", least, name, caption) if pages else None


@cache
def library() -> str:
    """Plotly's script from the installed package, compressed, in base64."""
    try:
        source = files("plotly") / "package_data" / "plotly.min.js"
        return base64.b64encode(gzip.compress(source.read_bytes(), 4, mtime=0)).decode()
    except (ModuleNotFoundError, FileNotFoundError):
        raise UserError("Reports need Plotly, which is not installed here. Run: pip install plotly") from None


def _axis(given: Mapping[str, Any]) -> dict[str, Any]:
    title = given.get("title")
    return {**given, "title": {"text": title}} if isinstance(title, str) else dict(given)


# ---- words and numbers -------------------------------------------------------------------------------------------


def plain(name: str, most: int = 28) -> str:
    """A name on one line, shortened to `most` characters, with nothing that Plotly takes for markup."""
    name = " ".join(name.split())
    return html.escape(name if len(name) <= most else name[: most - 1] + "…", quote=False)


def numbers(values: Iterable[Any], scale: float = 1, digits: int = 2) -> list[float | None]:
    """Values for a figure: rounded, None where one is not known."""
    found = np.round(np.asarray([*values], dtype=float) * scale, digits)
    return [None if np.isnan(value) else value for value in found.tolist()]


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour per name, or grey for all of them when there are more names than colours."""
    return dict(zip(names, PALETTE)) if len(names) <= len(PALETTE) else dict.fromkeys(names, MUTED)


# ---- traces ------------------------------------------------------------------------------------------------------


def curve(
    own: pd.Series, name: str, colour: str, scale: float = 1, width: float = 1.5, dash: str = "solid", key: bool = True
) -> Trace:
    """One curve over rounds; a lone point is a dot, since a line of one point is invisible. `key`: in the legend."""
    known = own.dropna()
    return {
        "type": "scatter",
        "mode": "markers" if len(known) == 1 else "lines",
        "x": known.index.tolist(),
        "y": numbers(known, scale, 3 if scale == 1 else 2),
        "name": plain(name),
        "showlegend": key,
        "line": {"color": colour, "width": width, "dash": dash},
        "marker": {"color": colour},
        "hovertemplate": "round %{x}: %{y}<extra>%{fullData.name}</extra>",
    }


def band(low: pd.Series, high: pd.Series, name: str = "", colour: str = SOFT) -> Trace:
    """The area between two curves."""
    rounds = low.index.tolist()
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*rounds, *reversed(rounds)],
        "y": numbers([*low, *reversed(high.tolist())]),
        "fill": "toself",
        "fillcolor": colour,
        "line": {"width": 0, "color": colour},
        "hoverinfo": "skip",
        "name": plain(name),
        "showlegend": bool(name),
    }


def dots(
    xs: Sequence[Any], ys: Sequence[Any], name: str, colour: str, hover: Sequence[str], *, symbol: str = "circle",
    hollow: bool = False, size: float = 9, ends: Sequence[tuple[float, float] | None] = (), key: bool = True,
) -> Trace:  # fmt: skip
    """Marks with what the mouse tells of each; `ends`: intervals about them along the horizontal axis."""
    trace: Trace = {"type": "scatter", "mode": "markers", "x": [*xs], "y": [*ys], "name": plain(name)}
    trace |= {"showlegend": key, "text": [*hover], "hovertemplate": "%{text}<extra></extra>"}
    face = f"{symbol}-open" if hollow else symbol
    trace["marker"] = {"color": colour, "size": size, "symbol": face, "line": {"width": 1.6, "color": colour}}
    if any(ends):
        up = [pair[1] - x if pair and x is not None else 0 for pair, x in zip(ends, xs)]
        down = [x - pair[0] if pair and x is not None else 0 for pair, x in zip(ends, xs)]
        trace["error_x"] = {"array": numbers(up), "arrayminus": numbers(down), "type": "data", "symmetric": False}
        trace["error_x"] |= {"color": colour, "thickness": 1.6, "width": 0}
    return trace


def heat(values: np.ndarray, rows: Sequence[str], columns: Sequence[str], hover: np.ndarray) -> Trace:
    """Cells shaded from 0 to 100, the first row on top, numbered where there are few; cells without a value stay grey.

    `hover` has a text for each cell.
    """
    trace = {"type": "heatmap", "z": [numbers(line, 1, 1) for line in values], "zmin": 0, "zmax": 100}
    trace |= {"x": distinct(columns), "y": distinct(rows), "colorscale": SHADES, "showscale": False}
    trace |= {"xgap": 1, "ygap": 1, "text": hover.tolist(), "hovertemplate": "%{text}<extra></extra>"}
    trace |= {"hoverongaps": False}
    if values.size <= MOST_NUMBERED:
        trace |= {"texttemplate": "%{z:.0f}", "textfont": {"size": 11}}
    return trace


def heat_axes() -> dict[str, Any]:
    """The axes of a heat map."""
    return {
        "x": {"showgrid": False, "type": "category", "tickangle": "auto"},
        "y": {"showgrid": False, "type": "category", "autorange": "reversed"},
    }


def distinct(names: Sequence[str], most: int = 18) -> list[str]:
    """Names that fit an axis and stay apart: places that are cut to the same text get a number."""
    found: dict[str, int] = {}
    told = []
    for name in names:
        text = plain(name, most)
        found[text] = found.get(text, 0) + 1
        told.append(text if found[text] == 1 else f"{text} ({found[text]})")
    return told


def rows_axis(names: Sequence[str], most: int = 26) -> dict[str, Any]:
    """A vertical axis with a named place for each row, the first one on top."""
    places = [*range(len(names))]
    labels = distinct(names, most)
    return {"tickvals": places, "ticktext": labels, "range": [len(names) - 0.4, -0.6], "showgrid": False}


def line_at(value: float, axis: str = "x", dash: str = "dash", colour: str = MUTED) -> dict[str, Any]:
    """A straight line across the panel at a value of one axis."""
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}0": value, f"{axis}1": value, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    return {"type": "line", "line": {"color": colour, "width": 1, "dash": dash}, "layer": "below"} | ends


def chance_line(value: float | None, axis: str = "x") -> dict[str, Any]:
    """Where guessing would be, with its name; nothing where that is not known."""
    if value is None:
        return {}
    note: dict[str, Any] = {"text": "chance", "font": {"size": 11, "color": MUTED}}
    if axis == "x":
        note |= {"x": value, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "center"}
    else:
        note |= {"y": value, "x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
    return {"shapes": [line_at(value, axis)], "notes": [note]}


def site_curves(curves: pd.DataFrame, scale: float = 1, names: Sequence[str] = (), mean: bool = True) -> list[Trace]:
    """Thin lines per site, a column of `curves` each (a band when there are very many), under the mean over them.

    Colours are those of `names`, by default of the sites drawn.
    """
    traces, several = [], curves.shape[1] > 1
    if curves.shape[1] > MOST_LINES:
        low, high = scale * np.nanpercentile(curves.to_numpy(dtype=float), [10, 90], axis=1)
        ends = pd.Series(low, curves.index), pd.Series(high, curves.index)
        traces.append(band(*ends, f"{curves.shape[1]} sites, 10th to 90th percentile"))
    else:
        look = colours(names or [*map(str, curves)])
        for site, own in curves.items():
            colour, width = look.get(str(site), MUTED), 1.2 if several else 2.4
            traces.append(curve(own, str(site), colour, scale, width))
    if several and mean:
        traces.append(curve(curves.mean(axis=1), "mean over sites", INK, scale, 3))
    return traces


def round_axis() -> dict[str, Any]:
    """A horizontal axis of whole rounds."""
    return {"title": "round", "tickformat": "d", "nticks": 7, "rangemode": "tozero"}
