"""A hospital's site, as its record of messages tells of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equipoise.hospitals.ledger import LEDGER
from equipoise.report.wording import traffic
from equipoise.watch.contents import MOST_LINES, Page, stamp_of, table
from equipoise.watch.tail import Tail


class SiteFollowed:
    """A hospital's site by its record of messages: what came in, what left, what was refused."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tail = Tail(folder / LEDGER, self.forget)
        self.forget()

    def forget(self) -> None:
        """Begin anew: the record did."""
        self.messages: list[dict[str, Any]] = []
        self.sums = {way: [0, 0] for way in ("in", "out", "refused")}

    def signature(self) -> Any:
        return stamp_of(self.folder / LEDGER)

    def page(self) -> Page:
        for line in self.tail.lines():
            self.messages = [*self.messages[-MOST_LINES:], line]
            way = line.get("way", "in")
            self.sums.setdefault(way, [0, 0])
            self.sums[way] = [self.sums[way][0] + 1, self.sums[way][1] + int(line.get("bytes", 0))]
        titles = {"in": "Came in", "out": "Left", "refused": "Refused"}
        facts = [[titles[way], f"{count:,}", traffic(size)] for way, (count, size) in self.sums.items()]
        rows = [
            [
                str(line.get("time", "")).replace("T", " ")[:19],
                titles.get(line.get("way", ""), ""),
                str(line.get("run", "")),
                str(line.get("round", "")),
                str(line.get("action", "")),
                ", ".join(line.get("entries", ())),
                str(line.get("why", "")),
                traffic(int(line.get("bytes", 0))),
            ]
            for line in reversed(self.messages[-MOST_LINES:])
        ]
        heads = ["Time", "Way", "Run", "Round", "Action", "Entries", "Why", "Size"]
        last = str(self.messages[-1].get("time", "")).replace("T", " ")[:19] if self.messages else "none"
        refused = [f"{line.get('action', 'a message')}: {line.get('why')}" for line in self.messages if line.get("why")]
        return {
            "kicker": "Site",
            "title": self.folder.resolve().parent.name if self.folder.name == "state" else self.folder.name,
            "status": f"last message: {last}",
            "facts": facts,
            "figures": {},
            "tables": {"exchange": table("Messages of this site, the newest first.", heads, rows, 7)},
            "warnings": [*dict.fromkeys(refused)],
        }
