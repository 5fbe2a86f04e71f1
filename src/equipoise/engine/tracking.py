"""Trackers of runs, TensorBoard and MLflow: observers that hand on a run's figures.

They need the extra `track`. Its packages are imported only if a run names a tracker.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape

from equipoise.core.errors import UserError, first_line, install
from equipoise.core.storage import write_text
from equipoise.core.table import dotted
from equipoise.engine.events import events_in

#: what a tracker imports, by its name
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow"}
LONGEST_NAME = 100
#: how a run ends, in MLflow's words
FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"
Event = Mapping[str, Any]


# ---- tracked values ------------------------------------------------------------------------------------------------


def figures(event: str, fields: Event) -> dict[str, float]:
    """The numbers of an event by name, such as `valid/global/site 1/macro_f1`; none of most kinds of events."""
    found: dict[str, float | None] = {}
    if event == "round":
        sites: Mapping[str, Mapping[str, float]] = fields["sites"]
        found = {"round/seconds": fields["seconds"], "round/lr": fields["lr"], "round/missing": len(fields["missing"])}
        found |= {f"round/{way}": sum(facts[way] for facts in sites.values()) for way in ("sent", "received")}
        for site, facts in sites.items():
            found |= {f"train/{plain_name(site)}/{name}": value for name, value in facts.items()}
    elif event == "evaluation":
        place = f"{fields['part']}/{fields['view']}/{plain_name(fields['site'])}"
        found = {f"{place}/{name}": value for name, value in fields["metrics"].items()}
    elif event == "selection":
        found = {"selected/round": fields.get("round"), "selected/value": fields.get("value")}
    elif event == "final":
        place = f"final/{fields['view']}/{fields['scope']}"
        place += f"/{plain_name(fields['site'])}" if fields["site"] is not None else ""
        over_sites = {key: fields.get("extra", {}).get(key) for key in ("worst_site_value", "spread")}
        found = {f"{place}/{name}": value for name, value in {**fields["metrics"], **over_sites}.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def step_of(event: str, fields: Event, last: int) -> int:
    """The round of an event; for the events at a run's end, the last round."""
    return fields["round"] if event in ("round", "evaluation") else last


def plain_name(name: str) -> str:
    """A name with nothing in it that MLflow refuses or takes for a path.

    One that had to change is marked by its digest, so that no two become one.
    """
    plain = re.sub(r"[^\w .-]", "_", name)[:LONGEST_NAME]
    if plain == name and plain.strip("."):
        return name
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """A config as flat text, `train.rounds` and the like."""
    return {plain_name(key): str(value) for key, value in dotted(config).items()}


# ---- where it is kept ---------------------------------------------------------------------------------------------


class Writer(Protocol):
    """Where a tracker keeps the figures of one run."""

    def begin(self, start: Event) -> None:
        """A run begins; `start` is the event that says how."""

    def go_on(self, number: int) -> bool:
        """A run goes on after a round; False where nothing of it is there to go on from."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Keep some figures of a round."""

    def close(self, status: str, report: Path | None) -> None:
        """The run is over, or stopped."""


class TensorBoardWriter:
    """TensorBoard's files, in the run's folder."""

    def __init__(self, folder: Path):
        self.folder = folder / "tensorboard"
        self.writer: Any = None

    def begin(self, start: Event) -> None:
        """Anew: what an attempt without a complete round may have left here no longer shows."""
        self._open(0)
        rows = "\n".join(f"| {key} | {value} |" for key, value in parameters(start["config"]).items())
        self.writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", 0)

    def go_on(self, number: int) -> bool:
        """Repeated rounds replace their earlier values."""
        there = self.folder.is_dir()
        if there:
            self._open(number + 1)
        return there

    def _open(self, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=purge_step)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, status: str, report: Path | None) -> None:
        self.writer.close()


class MLflowWriter:
    """A run of MLflow, where MLflow's own settings say; a note in the run's folder tells which, for when it is resumed.

    MLflow's active run belongs to a thread, and each tracker has a separate thread.
    """

    def __init__(self, folder: Path):
        self.note = folder / "mlflow.json"

    def begin(self, start: Event) -> None:
        import mlflow

        tags = {"method": start["method"], "version": start["version"]}
        run = mlflow.start_run(run_name=start["run"], tags=tags)
        write_text(self.note, json.dumps({"run_id": run.info.run_id}))
        mlflow.log_params(parameters(start["config"]))

    def go_on(self, number: int) -> bool:
        import mlflow

        known = self._known()
        if known is not None:
            mlflow.start_run(run_id=known)
        return known is not None

    def _known(self) -> str | None:
        """The run of MLflow that the note names; None where there is none, or not (any more) in MLflow's store."""
        import mlflow

        try:
            name = str(json.loads(self.note.read_text(encoding="utf-8"))["run_id"])
            run = mlflow.get_run(name)
        except FileNotFoundError:
            return None
        except mlflow.MlflowException as problem:
            if problem.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return name if run.info.lifecycle_stage == "active" else None

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        import mlflow

        mlflow.log_metrics(dict(numbers), step=step)

    def close(self, status: str, report: Path | None) -> None:
        import mlflow

        if report is not None:
            mlflow.log_artifact(str(report))
        mlflow.end_run(status)


# ---- trackers -----------------------------------------------------------------------------------------------------

WRITERS: Mapping[str, Callable[[Path], Writer]] = {"tensorboard": TensorBoardWriter, "mlflow": MLflowWriter}


def check_trackers(names: Sequence[str]) -> list[str]:
    """Trackers by name, each once, whose packages are there.

    Raises:
        UserError: for a name that is not known, or a package that is not installed
    """
    for name in names:
        if name not in PACKAGES:
            raise UserError(f"--track {name}: not known; choose one of {', '.join(PACKAGES)}")
        try:
            import_module(PACKAGES[name])
        except ImportError as problem:
            reason = f"--track {name} needs a package that is not there ({first_line(problem)})"
            raise UserError(f"{reason}: {install('track')}") from None
    return list(dict.fromkeys(names))


class Tracker:
    """Watches a run for one writer, which it serves in a separate thread: a slow server does not hold the run up.

    A writer that fails is given up, with a warning, and the run goes on.
    """

    def __init__(self, name: str, folder: Path):
        self.name = name
        self.failed = False
        self._events = folder / "events.jsonl"
        self._writer = WRITERS[name](folder)
        self._round = 0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def event(self, event: str, **fields: Any) -> None:
        """Hand on what happened."""
        self._round = fields["round"] if event == "resumed" else step_of(event, fields, self._round)
        if event == "start":
            self._post(partial(self._writer.begin, fields))
        elif event == "resumed":
            told = self._events.read_bytes()  # now: the run goes on writing
            self._post(partial(self._go_on, told, self._round))
        elif numbers := figures(event, fields):
            self._post(partial(self._writer.log, numbers, self._round))

    def _go_on(self, told: bytes, number: int) -> None:
        """Go on with what the writer has of the run; a writer that has nothing gets all events so far."""
        if self._writer.go_on(number):
            return
        past: list[Event] = list(events_in(told))
        self._writer.begin(past[0])
        for fields in past:
            if numbers := figures(fields["event"], fields):
                self._writer.log(numbers, step_of(fields["event"], fields, number))

    def close(self, status: str, report: Path | None = None) -> None:
        """Record how the run ended, and wait until the writer has every event; do nothing if the run never began."""
        if self._thread is not None:
            self._jobs.put(partial(self._writer.close, status, report))
            self._jobs.put(None)
            self._thread.join()

    def _post(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self.failed:
                continue
            try:
                job()
            except Exception as problem:  # a tracker's error must not stop the run
                self.failed = True
                why = escape(f"{self.name} failed, and the run goes on without it: {first_line(problem)}")
                Console(stderr=True).print(f"[yellow]warning:[/] {why}", highlight=False, soft_wrap=True)


class Trackers:
    """The trackers of one run, as one observer; as a context it tells them how the run ended."""

    def __init__(self, names: Sequence[str], folder: Path):
        self.report: Path | None = None
        """The run's report, once it is written."""
        self.ended = False
        """Whether the run came to its end."""
        self._trackers = [Tracker(name, folder) for name in names]

    def event(self, event: str, **fields: Any) -> None:
        """Hand on what happened."""
        self.ended = self.ended or event == "end"
        for tracker in self._trackers:
            tracker.event(event, **fields)

    def close(self, status: str) -> None:
        """Record how the run ended, and wait until the writer has every event."""
        for tracker in self._trackers:
            tracker.close(status, self.report)

    def lost(self) -> set[str]:
        """The names of those that failed."""
        return {tracker.name for tracker in self._trackers if tracker.failed}

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close(FINISHED)
        else:
            self.close(FAILED if issubclass(kind, Exception) else KILLED)
