"""A run, here or between hospitals, as its log tells of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from equipoise.engine.payload_files import safe_name
from equipoise.metrics import METRICS
from equipoise.report import plotting as plot
from equipoise.report.plotting import Panel
from equipoise.report.wording import UNKNOWN, duration, percent, ranges, traffic
from equipoise.watch.contents import LOG, MOST_LINES, Page, empty, shown, stamp_of, table
from equipoise.watch.tail import Tail

MAIN = METRICS[0]
#: rounds whose times foretell the next ones
RECENT = 10
#: a log that grew no longer than this ago is being written, in seconds
QUIET = 120.0
WAYS = ("sent", "received")


class RunFollowed:
    """A run by its log; between hospitals also the replies of the round in progress."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tail = Tail(folder / LOG, self.forget)
        self.forget()

    def forget(self) -> None:
        """Begin anew: the log did."""
        self.start: dict[str, Any] = {}
        self.rounds: dict[int, dict[str, Any]] = {}
        self.scores: dict[str, dict[str, dict[int, float]]] = {}
        self.warnings: dict[str, None] = {}
        self.chosen, self.ended, self.resumed = "", False, 0

    def signature(self) -> Any:
        replies = self.folder / "journal"
        return [stamp_of(self.folder / LOG), stamp_of(replies), self.quiet()]

    def page(self) -> Page:
        for event in self.tail.lines():
            self._take(event)
        if not self.start:
            return empty("Run", self.folder.name, "Waiting for the run to begin.")
        return {
            "kicker": "Federation" if (self.folder / "consortium.json").is_file() else "Run",
            "title": self.start.get("run", self.folder.name),
            "status": self._sentence(),
            "facts": self._facts(),
            "figures": dict(self._figures()),
            "tables": dict(self._tables()),
            "warnings": [*self.warnings],
        }

    def _take(self, event: dict[str, Any]) -> None:
        kind, number = event.get("event"), event.get("round")
        if kind == "start":
            self.start = event
            self.warnings |= dict.fromkeys(event.get("warnings", ()))
        elif kind == "warning":
            self.warnings[str(event.get("text", ""))] = None
        elif kind == "resumed":
            self.ended, self.resumed = False, self.resumed + 1
        elif kind == "round":
            self.rounds[int(event["round"])] = event
        elif kind == "evaluation" and event.get("part") == "valid" and number is not None:
            value = event.get("metrics", {}).get(MAIN.name)
            if value is not None:
                self.scores.setdefault(event["view"], {}).setdefault(event["site"], {})[int(number)] = value
        elif kind == "selection" and event.get("value") is not None:
            self.chosen = f"{percent(event['value'])} %"
        elif kind == "end":
            self.ended = True

    @property
    def last(self) -> int:
        return max(self.rounds, default=0)

    @property
    def planned(self) -> int:
        return int(self.start.get("config", {}).get("train", {}).get("rounds", 0))

    def quiet(self) -> bool:
        stamp = stamp_of(self.folder / LOG)
        return stamp is None or time.time() - stamp[0] > max(QUIET, 5 * self.pace())

    def pace(self) -> float:
        recent = sorted(self.rounds)[-RECENT:]
        return median(self.rounds[number]["seconds"] for number in recent) if recent else 0.0

    def status(self) -> str:
        if self.ended:
            return "finished"
        return "stopped, or in a long step" if self.quiet() else "running"

    def _sentence(self) -> str:
        """Where the run stands."""
        done = f"round {self.last} of {self.planned} is done" if self.rounds else "no round is done yet"
        text = f"{self.status().capitalize()}: {done}"
        left = self.pace() * (self.planned - self.last)
        text += f"; about {duration(left)} left" if self.rounds and left and not self.ended else ""
        return f"{text}. Resumed {self.resumed} time{'s' * (self.resumed > 1)}." if self.resumed else f"{text}."

    def _facts(self) -> list[list[str]]:
        done = f"{self.last} of {self.planned}" if self.planned else str(self.last)
        left = "none" if self.ended else duration(self.pace() * (self.planned - self.last))
        latest = self.rounds.get(self.last, {})
        answered, missing = len(latest.get("sites", ())), len(latest.get("missing", ()))
        moved = {
            way: sum(site[way] for done in self.rounds.values() for site in done["sites"].values()) for way in WAYS
        }
        view = self.view()
        now = [own[self.newest(view)] for own in self.scores.get(view, {}).values() if self.newest(view) in own]
        score = f"{percent(sum(now) / len(now))} %" if now else UNKNOWN
        return [
            ["Round", done, self.start.get("method", "")],
            ["Time left", left if self.rounds else UNKNOWN, f"{duration(self.pace())} a round" if self.rounds else ""],
            ["Sites that answered", f"{answered} of {answered + missing}" if latest else UNKNOWN, "in the last round"],
            [MAIN.title, self.chosen or score, "validation, " + ("selected" if self.chosen else f"{view} model")],
            ["Traffic", traffic(moved["sent"] + moved["received"]), f"{traffic(moved['sent'])} sent by sites"],
        ]

    @property
    def _names(self) -> list[str]:
        """The sites that train, in their order: they keep their colours in all figures."""
        return [site["name"] for site in self.start.get("sites", ()) if sum(site.get("train", ()))]

    def view(self) -> str:
        return next((view for view in ("personal", "global") if view in self.scores), "global")

    def newest(self, view: str) -> int:
        return max((number for own in self.scores.get(view, {}).values() for number in own), default=0)

    def _figures(self) -> Iterator[tuple[str, Any]]:
        for view in ("personal", "global"):
            curves = pd.DataFrame(self.scores.get(view, {})).sort_index()
            if not curves.empty:
                title = f"{MAIN.title} on validation images (%), {view} model"
                yield (
                    f"scores-{view}",
                    shown(Panel(plot.site_curves(curves, 100, self._names), plot.round_axis(), {}, title, 320)),
                )
        work = {
            quantity: pd.DataFrame(
                {
                    number: {s: own.get(quantity) for s, own in done["sites"].items()}
                    for number, done in self.rounds.items()
                }
            ).T.sort_index()
            for quantity in ("loss", "seconds")
        }
        for quantity, title in (("loss", "Training loss"), ("seconds", "Seconds of work in a round")):
            own = work[quantity].astype(float).dropna(axis=1, how="all") if len(work[quantity]) else work[quantity]
            if not own.empty:
                yield quantity, shown(Panel(plot.site_curves(own, 1, self._names), plot.round_axis(), {}, title))

    def _tables(self) -> Iterator[tuple[str, Any]]:
        latest, view = self.rounds.get(self.last, {}), self.view()
        here = {path.name.split("-", 2)[-1] for path in (self.folder / "journal").glob(f"{self.last + 1:05d}-*.json")}
        rows = []
        for site in self.start.get("sites", ())[:MOST_LINES]:
            name, own = site["name"], latest.get("sites", {}).get(site["name"], {})
            if not sum(site.get("train", ())):
                continue
            why = latest.get("missing", {}).get(name)
            state = "answered" if own else f"left out: {why}" if why else "not asked" if latest else UNKNOWN
            if not self.ended and any(safe_name(name) in reply for reply in here):
                state = f"has answered in round {self.last + 1}"
            score = self.scores.get(view, {}).get(name, {}).get(self.newest(view))
            moved = [traffic(own[way]) if own else UNKNOWN for way in WAYS]
            seconds = f"{own['seconds']:.1f} s" if own else UNKNOWN
            rows.append([name, state, f"{sum(site['train']):,}", percent(score), seconds, *moved])
        heads = ["Site", "Last round", "Training images", f"{MAIN.title} (%)", "Work", "Sent", "Received"]
        yield "sites", table("Who answered in the last round, and who did not and why.", heads, rows, 2)
        absences: dict[tuple[str, str], list[int]] = {}
        for number, done in self.rounds.items():
            for absence in done.get("missing", {}).items():
                absences.setdefault(absence, []).append(number)
        lost = [[site, ranges(numbers), why] for (site, why), numbers in absences.items()]
        yield "left-out", table("Sites that were left out of rounds so far.", ["Site", "Rounds", "Why"], lost)
