"""The contents of a page, as plain values: figures, tables and the stamps of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from equipoise.report.plotting import Panel

LOG = "events.jsonl"
#: lines of a table that a page gets; the newest, or the largest
MOST_LINES = 1000

Page = dict[str, Any]


class Followed(Protocol):
    """Something that a page follows."""

    def signature(self) -> Any:
        """Changes when the page does."""

    def page(self) -> Page:
        """The contents of the page."""


def empty(kicker: str, title: str, status: str) -> Page:
    """A page without contents yet."""
    return {
        "kicker": kicker,
        "title": title,
        "status": status,
        "facts": [],
        "figures": {},
        "tables": {},
        "warnings": [],
    }


def table(caption: str, heads: list[str], rows: list[list[str]], numbers_from: int = 99) -> dict[str, Any]:
    """A table; columns from this one on are numbers."""
    return {"caption": caption, "heads": heads, "rows": rows, "numbers": numbers_from}


def shown(panel: Panel) -> dict[str, Any]:
    """A figure of one panel."""
    return {"pages": [{"label": "", "panels": [panel.plain]}], "choose": "", "least": 300}


def stamp_of(path: Path) -> tuple[float, int] | None:
    """When a file was last written, and its size."""
    try:
        found = path.stat()
        return found.st_mtime, found.st_size
    except OSError:
        return None
