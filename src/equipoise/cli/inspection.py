"""Shows what a federation holds: a site x class table for the terminal, and a bubble chart."""

import html
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from equipoise.core.errors import UserError
from equipoise.data.federation import Federation
from equipoise.data.splits import PARTS

CHART_FORMATS = (".png", ".svg", ".pdf", ".jpg", ".webp")
_TRAIN, _OTHER, _INK, _FAINT = "#2a6f97", "#b8a07e", "#22313f", "#b9c0c7"
#: sites whose bubbles have numbers, letters of a site's name, and a cell in pixels
_MOST_NUMBERED, _LONGEST, _CELL = 24, 24, (92, 58)
#: pixels are drawn so many times as fine as they are told
_FINE = 4


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
    sites, names, unit = federation.places(), federation.classes, _unit(federation)
    parts = [next(part for part in ("train", "test", "valid") if part in site.splits) for site in sites]
    counts = np.stack([site.class_counts(len(names), part) for site, part in zip(sites, parts)])
    trains = np.array([part == "train" for part in parts])
    wide, high = _CELL if len(sites) <= _MOST_NUMBERED else (_CELL[0], 20)
    left = 30 + 7 * min(max(len(site.name) for site in sites), _LONGEST)
    top, right, bottom = 150, left + wide * len(names), 150 + high * len(sites)
    chart = Chart(right + 170, bottom + 30)
    chart.text(14, 24, f"{federation.name}: {unit} by site and class", 16)
    if not trains.all():
        for place, (text, colour) in enumerate(((f"training {unit}", _TRAIN), (f"test {unit}", _OTHER))):
            chart.circle(20, 46 + 18 * place, 5, colour)
            chart.text(32, 46 + 18 * place, text, 11)
    largest = (min(wide, high) / 2 - 1) / np.sqrt(counts.max())
    for (row, column), count in np.ndenumerate(counts):
        x, y = left + (column + 0.5) * wide, top + (row + 0.5) * high
        if not count:
            chart.text(x, y, "x", 12, _FAINT, "middle")
            continue
        radius = largest * np.sqrt(count)
        chart.circle(x, y, radius, _TRAIN if trains[row] else _OTHER)
        if high == _CELL[1]:
            inside = radius > 16
            place, colour = (x, "white") if inside else (x + radius + 4, _INK)
            chart.text(place, y, f"{count:,}", 10, colour, "middle" if inside else "start")
    for column, (name, total) in enumerate(zip(names, counts[trains].sum(axis=0))):
        x = left + (column + 0.5) * wide
        size = 55 * total / max(counts[trains].sum(axis=0).max(), 1)
        chart.bar(x - 16, top - 26 - size, x + 16, top - 26, _TRAIN)
        chart.text(x, top - 33 - size, f"{total:,}", 10, _INK, "middle")
        chart.text(x, top - 14, _cut(name, 14), 11, _INK, "middle")
    for row, (site, total) in enumerate(zip(sites, counts.sum(axis=1))):
        y = top + (row + 0.5) * high
        size = 100 * total / counts.sum(axis=1).max()
        chart.bar(
            right + 10, y - min(8, high / 3), right + 10 + size, y + min(8, high / 3), _TRAIN if trains[row] else _OTHER
        )
        chart.text(right + 15 + size, y, f"{total:,}", 10)
        chart.text(left - 8, y, _cut(site.name, _LONGEST), 11, _INK, "end")
    chart.save(path)


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 2] + ".."


class Chart:
    """Circles, bars and texts, each written as SVG and drawn as pixels; the size is in pixels."""

    def __init__(self, width: float, height: float):
        self.size = round(width), round(height)
        self.svg: list[str] = []
        self.image = Image.new("RGB", (_FINE * self.size[0], _FINE * self.size[1]), "white")
        self.draw = ImageDraw.Draw(self.image)

    def circle(self, x: float, y: float, radius: float, colour: str) -> None:
        """A disc about a point."""
        self.svg.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}"/>')
        self.draw.ellipse(
            [_FINE * (x - radius), _FINE * (y - radius), _FINE * (x + radius), _FINE * (y + radius)], colour
        )

    def bar(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        """A filled rectangle."""
        at = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'
        self.svg.append(f'<rect {at} fill="{colour}"/>')
        self.draw.rectangle([_FINE * left, _FINE * top, _FINE * right, _FINE * bottom], colour)

    def text(self, x: float, y: float, text: str, size: int, colour: str = _INK, anchor: str = "start") -> None:
        """A line of text that starts at a point, ends there, or has its middle there."""
        look = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}" dominant-baseline="central"'
        self.svg.append(f'<text x="{x:.1f}" y="{y:.1f}" {look}>{html.escape(text)}</text>')
        try:
            font: Any = ImageFont.truetype("DejaVuSans.ttf", _FINE * size)
        except OSError:  # Pillow's own font has the letters of ASCII alone
            font = ImageFont.load_default(_FINE * size)
            text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
        self.draw.text(
            (_FINE * x, _FINE * y), text, colour, font, anchor=f"{ {'start': 'l', 'end': 'r'}.get(anchor, 'm') }m"
        )

    def save(self, path: Path) -> None:
        """Write the chart in the format that the file's name tells."""
        if path.suffix.lower() != ".svg":
            self.image.resize((2 * self.size[0], 2 * self.size[1]), Image.Resampling.LANCZOS).save(path)
            return
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        white = f'<rect width="{width}" height="{height}" fill="white"/>'
        path.write_text("\n".join([head, white, *self.svg, "</svg>"]), encoding="utf-8")
