"""Runs what a study lacks: resumes half-done runs, lets several share a device, and stops in time when asked to.

A run is a generator that yields between training steps, so several take turns in one process. On a CPU, dropout
draws from torch's default generator: each run gets its own state back before its turn, and so the bits of a run do not
depend on who it shares with. On a GPU the cohort sees to that.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from equipoise.contract.config import Config
from equipoise.core.errors import FolderBusy, UserError, is_users
from equipoise.core.storage import write_text
from equipoise.engine.loop import Observer, Run
from equipoise.engine.payload_files import claimed_folder, refuse_foreign
from equipoise.engine.runs import prepare_run
from equipoise.studies.checks import REMEDY, DamagedRun, check_finished, check_log, is_finished
from equipoise.studies.grid import Cell, listed

#: beside a run's own files: what the study knows about it
NOTE = "study.json"


class Display(Protocol):
    """Who shows a grid's progress."""

    def started(self, cell: Cell, config: Config) -> Observer:
        """A run begins or goes on; gives what watches it."""

    def ended(self, cell: Cell, how: str) -> None:
        """A run is finished, has stopped or failed."""


@dataclass
class Outcome:
    """What came of the runs that were asked for, by label."""

    finished: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    """Runs that another process is at."""
    failed: dict[str, Exception] = field(default_factory=dict)

    def complain(self) -> None:
        """Raise what went wrong, if anything did, each problem once; what the user can mend as such."""
        if not self.failed:
            return
        labels: dict[str, list[str]] = {}
        for label, problem in self.failed.items():
            labels.setdefault(str(problem) or type(problem).__name__, []).append(label)
        lines = "\n".join(f"  {listed(names)}: {text}" for text, names in labels.items())
        ours = next((problem for problem in self.failed.values() if not is_users(problem)), None)
        if ours is None:
            raise UserError(f"failed runs:\n{lines}")
        raise RuntimeError(f"failed runs:\n{lines}") from ours


class FinishedElsewhere(Exception):
    """Another process has brought a run to its end meanwhile."""


class Limit:
    """The time that may pass; without seconds, any."""

    def __init__(self, seconds: float | None):
        self.set = seconds is not None
        self.end = time.monotonic() + (seconds or 0.0)
        self.round_seconds = 0.0
        """How long the latest round took: what another one will need at least."""

    def allows_a_round(self) -> bool:
        """Whether another round would be complete in time."""
        return not self.set or time.monotonic() + self.round_seconds <= self.end


class Turns:
    """One run among those that take turns."""

    def __init__(self, cell: Cell, run: Run, limit: Limit, together: int, keep: bool):
        self.cell = cell
        self.run = run
        self.limit = limit
        self.together = together
        self.keep = keep
        self.stopped_after: int | None = None
        """The round that is on disk and the last one for now, when time is up."""
        self._round_began = time.monotonic()
        run.after_round = self._round_ended
        run.tenancy = self._tenancy
        self._steps = run.steps(resume=True)
        self._random = torch.get_rng_state()

    def step(self) -> bool:
        """Issue the run's next step under its own random state; False when there is none left."""
        torch.set_rng_state(self._random)
        try:
            next(self._steps)
        except StopIteration:
            return False
        self._random = torch.get_rng_state()
        return True

    def _round_ended(self, number: int) -> bool:
        """Note how long a round takes; True where there is no time for another, so that this one is saved."""
        now = time.monotonic()
        self.limit.round_seconds, self._round_began = now - self._round_began, now
        if 0 < number < self.run.config.train.rounds and not self.limit.allows_a_round():
            self.stopped_after = number
        return self.stopped_after is not None

    @contextmanager
    def _tenancy(self) -> Iterator[None]:
        """What only one process may do: look whether the run is finished, and clear up once it is."""
        if is_finished(self.cell.folder):
            raise FinishedElsewhere
        _note_sharing(self.cell, self.together)
        yield
        if not self.keep:
            _clear_up(self.cell.folder)

    def close(self) -> None:
        """Stop where it is; what is on disk can be resumed."""
        self._steps.close()


def run_grid(
    cells: Sequence[tuple[Cell, Config]],
    display: Display,
    together: int = 1,
    limit_seconds: float | None = None,
    keep: bool = False,
    check: Callable[[Run], None] | None = None,
) -> Outcome:
    """Run the unfinished among the cells, `together` at a time; gives what came of them.

    With a limit, a run saves a round and stops when its next one would not be complete in time, and nothing is begun
    that could not complete one; a run whose last round is done comes to its end. `keep`:
    checkpoints of finished runs stay on disk. `check` may refuse a run before it trains.
    """
    outcome, waiting = Outcome(), deque[tuple[Cell, Config]]()
    for cell, config in cells:
        try:
            check_log(cell.folder)
            if not is_finished(cell.folder):
                waiting.append((cell, config))
                continue
            check_finished(cell, config)
            outcome.finished.append(cell.label)
            if not keep and (cell.folder / "checkpoints").exists():  # it was ended before it could clear up
                with suppress(FolderBusy), claimed_folder(cell.folder):
                    _clear_up(cell.folder)
        except DamagedRun as problem:  # one run's damage is no reason to leave the others undone
            outcome.failed[cell.label] = problem
    _check_shareable([config for _, config in waiting], together)
    running = _Running(display, outcome, Limit(limit_seconds), together, keep, check)
    try:
        while waiting or running.active:
            while waiting and len(running.active) < together and running.limit.allows_a_round():
                running.begin(*waiting.popleft())
            if not running.active:
                break
            for turns in list(running.active):
                running.advance(turns)
    finally:
        for turns in running.active:
            turns.close()
    outcome.stopped += [cell.label for cell, _ in waiting]
    return outcome


def _check_shareable(configs: Sequence[Config], together: int) -> None:
    """Precision and kernels are settings of the process: runs that share one must agree on them."""
    unlike = {(c.compute.device, c.compute.precision, c.compute.deterministic, c.compute.threads) for c in configs}
    if together > 1 and len(unlike) > 1:
        raise UserError("runs that share a process need the same compute settings; use --together 1")


class _Running:
    """The runs in progress, and what becomes of each."""

    def __init__(
        self,
        display: Display,
        outcome: Outcome,
        limit: Limit,
        together: int,
        keep: bool,
        check: Callable[[Run], None] | None,
    ):
        self.display = display
        self.check = check
        self.outcome = outcome
        self.limit = limit
        self.together = together
        self.keep = keep
        self.active: list[Turns] = []

    def begin(self, cell: Cell, config: Config) -> None:
        """Open or reopen a run."""
        try:
            watcher = self.display.started(cell, config)
            refuse_foreign(cell.folder)
            if is_finished(cell.folder):  # by another process, since the grid was listed
                check_finished(cell, config)
                self._finish(cell)
                return
            run = prepare_run(config, cell.folder, [watcher])
            if self.check is not None:
                self.check(run)
            self.active.append(Turns(cell, run, self.limit, self.together, self.keep))
        except Exception as problem:
            self._fail(cell, problem)

    def advance(self, turns: Turns) -> None:
        """One step of one run, and what follows from it."""
        try:
            going = turns.step()
        except FinishedElsewhere:
            going = False
        except FolderBusy:
            self.active.remove(turns)
            self.outcome.busy.append(turns.cell.label)
            self.display.ended(turns.cell, "is left to another process, which is at it")
            return
        except Exception as problem:
            self.active.remove(turns)
            self._fail(turns.cell, problem)
            return
        if not going:
            self.active.remove(turns)
            self._finish(turns.cell)
        elif turns.stopped_after is not None:
            self._stop(turns)

    def _finish(self, cell: Cell) -> None:
        self.outcome.finished.append(cell.label)
        self.display.ended(cell, "finished")

    def _stop(self, turns: Turns) -> None:
        self.active.remove(turns)
        turns.close()
        self.outcome.stopped.append(turns.cell.label)
        self.display.ended(turns.cell, f"stopped after round {turns.stopped_after}")

    def _fail(self, cell: Cell, problem: Exception) -> None:
        """One run's failure is no reason to leave the others undone."""
        self.outcome.failed[cell.label] = problem
        self.display.ended(cell, f"failed: {problem}")


def _clear_up(folder: Path) -> None:
    """Delete what only an unfinished run needs."""
    for part in ("checkpoints", "sites"):
        shutil.rmtree(folder / part, ignore_errors=True)


def _note_sharing(cell: Cell, together: int) -> None:
    """Times measured while others compute on the same device are not this run's alone: leave word of it."""
    most = max(shared_with(cell.folder), together)
    write_text(cell.folder / NOTE, json.dumps({"row": cell.row.name, "seed": cell.seed, "together": most}))


def shared_with(folder: Path) -> int:
    """How many runs shared the device while a run did, at most; 1 where no word of it was left."""
    path = folder / NOTE
    if not path.is_file():
        return 1
    try:
        return int(json.loads(path.read_bytes())["together"])
    except (ValueError, KeyError, TypeError):
        raise DamagedRun(f"{path} is damaged; {REMEDY}") from None
