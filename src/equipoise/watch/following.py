"""What is followed: a run or a federation by its log, a study by its runs, a hospital's site by its record of messages.

Each gives the contents of the page as plain values, and does no work while nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import pandas as pd

from equipoise.core.errors import UserError, parse_toml
from equipoise.engine.payload_files import safe_name
from equipoise.hospitals.ledger import LEDGER
from equipoise.metrics import METRICS
from equipoise.report import plotting as plot
from equipoise.report.plotting import Panel
from equipoise.report.wording import UNKNOWN, duration, percent, ranges, traffic
from equipoise.watch.tail import Tail

LOG = "events.jsonl"
MAIN = METRICS[0]
#: rounds whose times foretell the next ones
RECENT = 10
#: lines of a table that a page gets; the newest, or the largest
MOST_LINES = 1000
#: a log that grew no longer than this ago is being written, in seconds
QUIET = 120.0

Page = dict[str, Any]


class Followed(Protocol):
    """Something that a page follows."""

    def signature(self) -> Any:
        """Changes when the page does."""

    def page(self) -> Page:
        """The contents of the page."""


def follow(path: Path) -> Followed:
    """What lies at a path: a run's folder, a study's, a site's state, or a folder of runs (its newest run).

    Raises:
        UserError: when it is none of these
    """
    if path.suffix == ".toml" and path.is_file():
        path = _state_of(path)
    if (path / LEDGER).is_file():
        return SiteFollowed(path)
    if (path / LOG).is_file() or (path / "consortium.json").is_file():
        return RunFollowed(path)
    if (path / "runs").is_dir() or (path / "summary.json").is_file():
        return StudyFollowed(path)
    newest = max(path.glob(f"*/{LOG}"), key=lambda log: log.stat().st_mtime, default=None)
    if newest is None:
        raise UserError(
            f"{path} holds no run, study or site to watch. Name a folder that `equipoise run`, `study`, `server` or "
            "`site` writes."
        )
    return RunFollowed(newest.parent)


def _state_of(file: Path) -> Path:
    """The state folder that a site's file names."""
    raw = parse_toml(file.read_bytes(), str(file))
    if "superlink" not in raw:
        raise UserError(f"{file} is not the file of a site. To watch a server, name the folder of its run.")
    return file.parent / str(raw.get("state", "state"))


# ---- a run, here or between hospitals ----------------------------------------------------------------------------


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
        return [_stamp(self.folder / LOG), _stamp(replies), self._quiet()]

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
    def _last(self) -> int:
        return max(self.rounds, default=0)

    @property
    def _planned(self) -> int:
        return int(self.start.get("config", {}).get("train", {}).get("rounds", 0))

    def _quiet(self) -> bool:
        stamp = _stamp(self.folder / LOG)
        return stamp is None or time.time() - stamp[0] > max(QUIET, 5 * self._pace())

    def _pace(self) -> float:
        recent = sorted(self.rounds)[-RECENT:]
        return median(self.rounds[number]["seconds"] for number in recent) if recent else 0.0

    def _status(self) -> str:
        if self.ended:
            return "finished"
        return "stopped, or in a long step" if self._quiet() else "running"

    def _sentence(self) -> str:
        """Where the run stands."""
        done = f"round {self._last} of {self._planned} is done" if self.rounds else "no round is done yet"
        text = f"{self._status().capitalize()}: {done}"
        left = self._pace() * (self._planned - self._last)
        text += f"; about {duration(left)} left" if self.rounds and left and not self.ended else ""
        return f"{text}. Resumed {self.resumed} time{'s' * (self.resumed > 1)}." if self.resumed else f"{text}."

    def _facts(self) -> list[list[str]]:
        done = f"{self._last} of {self._planned}" if self._planned else str(self._last)
        left = "none" if self.ended else duration(self._pace() * (self._planned - self._last))
        latest = self.rounds.get(self._last, {})
        answered, missing = len(latest.get("sites", ())), len(latest.get("missing", ()))
        moved = {
            way: sum(site[way] for done in self.rounds.values() for site in done["sites"].values()) for way in WAYS
        }
        view = self._view()
        now = [own[self._newest(view)] for own in self.scores.get(view, {}).values() if self._newest(view) in own]
        score = f"{percent(sum(now) / len(now))} %" if now else UNKNOWN
        return [
            ["Round", done, self.start.get("method", "")],
            ["Time left", left if self.rounds else UNKNOWN, f"{duration(self._pace())} a round" if self.rounds else ""],
            ["Sites that answered", f"{answered} of {answered + missing}" if latest else UNKNOWN, "in the last round"],
            [MAIN.title, self.chosen or score, "validation, " + ("selected" if self.chosen else f"{view} model")],
            ["Traffic", traffic(moved["sent"] + moved["received"]), f"{traffic(moved['sent'])} sent by sites"],
        ]

    @property
    def _names(self) -> list[str]:
        """The sites that train, in their order: they keep their colours in all figures."""
        return [site["name"] for site in self.start.get("sites", ()) if sum(site.get("train", ()))]

    def _view(self) -> str:
        return next((view for view in ("personal", "global") if view in self.scores), "global")

    def _newest(self, view: str) -> int:
        return max((number for own in self.scores.get(view, {}).values() for number in own), default=0)

    def _figures(self) -> Iterator[tuple[str, Any]]:
        for view in ("personal", "global"):
            curves = pd.DataFrame(self.scores.get(view, {})).sort_index()
            if not curves.empty:
                title = f"{MAIN.title} on validation images (%), {view} model"
                yield (
                    f"scores-{view}",
                    _shown(Panel(plot.site_curves(curves, 100, self._names), plot.round_axis(), {}, title, 320)),
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
                yield quantity, _shown(Panel(plot.site_curves(own, 1, self._names), plot.round_axis(), {}, title))

    def _tables(self) -> Iterator[tuple[str, Any]]:
        latest, view = self.rounds.get(self._last, {}), self._view()
        here = {path.name.split("-", 2)[-1] for path in (self.folder / "journal").glob(f"{self._last + 1:05d}-*.json")}
        rows = []
        for site in self.start.get("sites", ())[:MOST_LINES]:
            name, own = site["name"], latest.get("sites", {}).get(site["name"], {})
            if not sum(site.get("train", ())):
                continue
            why = latest.get("missing", {}).get(name)
            state = "answered" if own else f"left out: {why}" if why else "not asked" if latest else UNKNOWN
            if not self.ended and any(safe_name(name) in reply for reply in here):
                state = f"has answered in round {self._last + 1}"
            score = self.scores.get(view, {}).get(name, {}).get(self._newest(view))
            moved = [traffic(own[way]) if own else UNKNOWN for way in WAYS]
            seconds = f"{own['seconds']:.1f} s" if own else UNKNOWN
            rows.append([name, state, f"{sum(site['train']):,}", percent(score), seconds, *moved])
        heads = ["Site", "Last round", "Training images", f"{MAIN.title} (%)", "Work", "Sent", "Received"]
        yield "sites", _table("Who answered in the last round, and who did not and why.", heads, rows, 2)
        absences: dict[tuple[str, str], list[int]] = {}
        for number, done in self.rounds.items():
            for absence in done.get("missing", {}).items():
                absences.setdefault(absence, []).append(number)
        lost = [[site, ranges(numbers), why] for (site, why), numbers in absences.items()]
        yield "left-out", _table("Sites that were left out of rounds so far.", ["Site", "Rounds", "Why"], lost)


WAYS = ("sent", "received")

# ---- a study -----------------------------------------------------------------------------------------------------


class StudyFollowed:
    """A study by the logs of its runs; only logs that changed are read on."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs: dict[Path, tuple[Any, RunFollowed]] = {}

    def _logs(self) -> dict[Path, Any]:
        return {log.parent: _stamp(log) for log in sorted((self.folder / "runs").rglob(LOG))}

    def signature(self) -> Any:
        return self._logs()

    def page(self) -> Page:
        for run, stamp in self._logs().items():
            known = self.runs.get(run, (None, RunFollowed(run)))
            if known[0] != stamp:
                known[1].page()
            self.runs[run] = (stamp, known[1])
        runs = {run: followed for run, (_, followed) in self.runs.items() if followed.start}
        planned = self._planned()
        done = [followed for followed in runs.values() if followed.ended]
        live = {run: followed for run, followed in runs.items() if not followed.ended and not followed._quiet()}
        left = sum(own._pace() * (own._planned - own._last) for own in live.values()) / max(len(live), 1)
        whole = f" of {planned}" if planned else ""
        facts = [
            ["Runs finished", f"{len(done)}{whole}", "of the first grid" if planned else ""],
            ["Running", str(len(live)), f"their end in about {duration(left)}" if live else ""],
            ["Stopped", str(len(runs) - len(done) - len(live)), ""],
        ]
        rows = [self._row(run, own) for run, own in runs.items()][:MOST_LINES]
        heads = ["Run", "State", "Round", f"{MAIN.title} (%), validation", "Time a round", "Left out"]
        texts = {text: None for own in runs.values() for text in own.warnings}
        return {
            "kicker": "Study",
            "title": self.folder.name,
            "status": "running" if live else "no run is being written",
            "facts": facts,
            "figures": self._figures(runs),
            "tables": {"runs": _table("The runs of the study.", heads, rows, 2)},
            "warnings": [*texts],
        }

    def _planned(self) -> int:
        from equipoise.studies.grid import grid
        from equipoise.studies.study_file import load_study

        file = self.folder / "study.toml"
        try:
            return len(grid(load_study(str(file) if file.is_file() else self.folder.name), self.folder))
        except (UserError, OSError):
            return 0

    def _row(self, run: Path, own: RunFollowed) -> list[str]:
        view = own._view()
        now = [scores[own._newest(view)] for scores in own.scores.get(view, {}).values() if own._newest(view) in scores]
        missing = sum(len(done.get("missing", ())) for done in own.rounds.values())
        score = percent(sum(now) / len(now)) if now else UNKNOWN
        name = str(run.relative_to(self.folder / "runs"))
        return [name, own._status(), f"{own._last} of {own._planned}", score, duration(own._pace()), str(missing)]

    def _figures(self, runs: dict[Path, RunFollowed]) -> dict[str, Any]:
        means = {}
        for run, own in runs.items():
            curves = pd.DataFrame(own.scores.get(own._view(), {})).sort_index()
            if not curves.empty:
                means[run.name] = curves.mean(axis=1)
        if not means:
            return {}
        order = sorted(means, key=lambda name: -means[name].iloc[-1])
        colours = dict(zip(order, plot.PALETTE))
        traces = [
            plot.curve(means[name], name, colours.get(name, plot.FAINT), 100, 1.8, key=name in colours)
            for name in reversed(order[: plot.MOST_LINES])
        ]
        title = f"{MAIN.title} on validation images (%), mean over sites"
        return {"scores": _shown(Panel(traces, plot.round_axis(), {}, title, 340))}


# ---- a hospital's site -------------------------------------------------------------------------------------------


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
        return _stamp(self.folder / LEDGER)

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
            "tables": {"exchange": _table("Messages of this site, the newest first.", heads, rows, 7)},
            "warnings": [*dict.fromkeys(refused)],
        }


# ---- the page ----------------------------------------------------------------------------------------------------


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


def _table(caption: str, heads: list[str], rows: list[list[str]], numbers_from: int = 99) -> dict[str, Any]:
    """A table; columns from this one on are numbers."""
    return {"caption": caption, "heads": heads, "rows": rows, "numbers": numbers_from}


def _shown(panel: Panel) -> dict[str, Any]:
    """A figure of one panel."""
    return {"pages": [{"label": "", "panels": [panel.plain]}], "choose": "", "least": 300}


def _stamp(path: Path) -> tuple[float, int] | None:
    """When a file was last written, and its size."""
    try:
        found = path.stat()
        return found.st_mtime, found.st_size
    except OSError:
        return None
