"""Runs what a study lacks: resumes half-done runs, lets several share a device, and stops in time when asked to.

A run is a generator that yields between training steps, so several take turns in one process. On a CPU, dropout
draws from torch's default generator: each run gets its own state back before its turn, and so the bits of a run do not
depend on who it shares with. On a GPU the cohort sees to that.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
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
FINISHED = "finished"
Life = Generator[None, None, str]


class Display(Protocol):
    """Who shows a grid's progress."""

    def started(self, cell: Cell, config: Config) -> Observer:
        """A run begins or goes on; gives what watches it."""

    def ended(self, cell: Cell, how: str) -> None:
        """A run is finished, has stopped or failed."""


@dataclass
class Tally:
    """The outcomes of the requested runs, by label."""

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
        self.end = math.inf if seconds is None else time.monotonic() + seconds
        self.round_seconds = 0.0
        """How long the latest round took: what another one will need at least."""

    def allows_a_round(self) -> bool:
        """Whether another round would be complete in time."""
        return time.monotonic() + self.round_seconds <= self.end


def run_grid(
    cells: Sequence[tuple[Cell, Config]],
    display: Display,
    together: int = 1,
    limit_seconds: float | None = None,
    keep: bool = False,
    check: Callable[[Run], None] = lambda run: None,
) -> Tally:
    """Run the unfinished among the cells, `together` at a time; gives what came of them.

    With a limit, a run saves a round and stops when its next one would not be complete in time, and nothing is begun
    that could not complete one; a run whose last round is done comes to its end. `keep`: checkpoints of finished runs
    stay on disk. `check` may refuse a run before it trains. One run's failure is no reason to leave the others undone.
    """
    outcome, limit = Tally(), Limit(limit_seconds)
    waiting = deque(_unfinished(cells, outcome, keep))
    _check_shareable([config for _, config in waiting], together)
    active: list[tuple[Cell, Life]] = []
    try:
        while waiting or active:
            while waiting and len(active) < together and limit.allows_a_round():
                cell, config = waiting.popleft()
                active.append((cell, _life(cell, config, display, limit, together, keep, check)))
            if not active:
                break
            for cell, life in list(active):
                if how := _advance(cell, life, outcome):
                    active.remove((cell, life))
                    display.ended(cell, how)
    finally:
        for _, life in active:
            life.close()
    outcome.stopped += [cell.label for cell, _ in waiting]
    return outcome


def _unfinished(cells: Sequence[tuple[Cell, Config]], outcome: Tally, keep: bool) -> Iterator[tuple[Cell, Config]]:
    """The runs to begin or resume; others are noted, and cleared up if they were ended before that."""
    for cell, config in cells:
        try:
            check_log(cell.folder)
            if not is_finished(cell.folder):
                yield cell, config
                continue
            check_finished(cell, config)
            outcome.finished.append(cell.label)
            if not keep and (cell.folder / "checkpoints").exists():
                with suppress(FolderBusy), claimed_folder(cell.folder):
                    _clear_up(cell.folder)
        except DamagedRun as problem:
            outcome.failed[cell.label] = problem


def _check_shareable(configs: Sequence[Config], together: int) -> None:
    """Precision and kernels are settings of the process: runs that share one must agree on them."""
    unlike = {(c.compute.device, c.compute.precision, c.compute.deterministic, c.compute.threads) for c in configs}
    if together > 1 and len(unlike) > 1:
        raise UserError("runs that share a process need the same compute settings; use --together 1")


def _life(
    cell: Cell,
    config: Config,
    display: Display,
    limit: Limit,
    together: int,
    keep: bool,
    check: Callable[[Run], None],
) -> Life:
    """A run to its end or a stop, a step at a time and under its own random state; gives how it ended."""
    watcher = display.started(cell, config)
    refuse_foreign(cell.folder)
    if is_finished(cell.folder):  # by another process, since the grid was listed
        check_finished(cell, config)
        return FINISHED
    run = prepare_run(config, cell.folder, [watcher])
    check(run)
    began, saved = time.monotonic(), 0

    def round_ended(number: int) -> bool:
        """Note how long a round takes; True where there is no time for another, so that this one is saved."""
        nonlocal began, saved
        now = time.monotonic()
        limit.round_seconds, began = now - began, now
        if 0 < number < config.train.rounds and not limit.allows_a_round():
            saved = number
        return saved > 0

    run.after_round, run.tenancy = round_ended, lambda: _tenancy(cell, together, keep)
    steps, random = run.steps(resume=True), torch.get_rng_state()
    with closing(steps):
        while not saved:
            torch.set_rng_state(random)
            try:
                next(steps)
            except StopIteration:
                return FINISHED
            random = torch.get_rng_state()
            yield
    return f"stopped after round {saved}"


def _advance(cell: Cell, life: Life, outcome: Tally) -> str:
    """One step of a run; gives how it ended, if it did, and notes it."""
    try:
        next(life)
        return ""
    except StopIteration as end:
        how = end.value
    except FinishedElsewhere:
        how = FINISHED
    except FolderBusy:
        outcome.busy.append(cell.label)
        return "is left to another process, which is at it"
    except Exception as problem:
        outcome.failed[cell.label] = problem
        return f"failed: {problem}"
    (outcome.finished if how == FINISHED else outcome.stopped).append(cell.label)
    return how


@contextmanager
def _tenancy(cell: Cell, together: int, keep: bool) -> Iterator[None]:
    """What only one process may do: look whether the run is finished, and clear up once it is."""
    if is_finished(cell.folder):
        raise FinishedElsewhere
    _note_sharing(cell, together)
    yield
    if not keep:
        _clear_up(cell.folder)


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
