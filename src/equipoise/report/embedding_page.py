"""Features of one run's images, or of several side by side, drawn by class and by site on a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from equipoise.core.storage import write_text
from equipoise.core.version import __version__
from equipoise.evidence.embedding import Embedding
from equipoise.report.page import Group, page
from equipoise.report.plotting import Figure, Panel, Trace, colours, dots, figure
from equipoise.report.run_sections import section

KINDS = {"pca": "PCA", "t-sne": "t-SNE"}
NO_AXIS = {"showticklabels": False, "zeroline": False}


def write_embedding_page(found: Sequence[Embedding], maps: dict[str, list[np.ndarray]], path: Path) -> None:
    """Write the page.

    Args:
        maps: by the name of a map, the points (n, 2) of each embedding
    """
    groups = [
        Group(
            kind,
            KINDS[kind],
            [section("", "", _drawn(found, points, kind, "class"), _drawn(found, points, kind, "site"))],
        )
        for kind, points in maps.items()
    ]
    personal = ", ".join(one.run for one in found if one.personal)
    note = (
        f"{personal}: each site’s images went through that site’s own model. Distances between sites mean little there."
    )
    groups += [Group("models", "Models", [section("", "", note)])] if personal else []
    title = ", ".join(one.run for one in found)
    text = page(
        "report.html", Path(__file__).parent, kicker="Features of images", title=title, groups=groups, finding="",
        lead=None, csv="", latex="", version=__version__,
    )  # fmt: skip
    write_text(path, text)


def _drawn(found: Sequence[Embedding], points: Sequence[np.ndarray], kind: str, what: str) -> Figure | None:
    """A panel for each run, whose marks are coloured by class or by site."""
    panels = []
    for place, (one, plane) in enumerate(zip(found, points)):
        values = np.array(one.classes)[one.label] if what == "class" else one.site
        names = [*one.classes] if what == "class" else [*dict.fromkeys(one.site.tolist())]
        known = colours(names)
        traces: list[Trace] = []
        for name in names:
            rows = np.flatnonzero(values == name)
            told = [f"{np.array(one.classes)[one.label[row]]}, {one.site[row]}, {one.split[row]}" for row in rows]
            xs, ys = (plane[rows, axis].round(4).tolist() for axis in (0, 1))
            traces.append(dots(xs, ys, name, known[name], told, size=4, key=place == 0))
        panels.append(Panel(traces, x=NO_AXIS, y=NO_AXIS, title=one.run, height=360))
    caption = f"{KINDS[kind]} of the features that the head gets, by class. A mark is an image."
    return figure(panels, what, caption if what == "class" else "The same by site.", 320)
