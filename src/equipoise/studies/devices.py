"""A study on several devices: a process for each, which takes the dearest run that waits; or jobs of a cluster.

Runs do not know of each other. A run belongs to the process that has claimed its folder, so any number of processes,
jobs and machines can work at one study.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from equipoise.contract.config import Config
from equipoise.core.errors import UserError, first_line, parse_toml
from equipoise.core.extras import imported
from equipoise.core.outside import short_name
from equipoise.engine.loop import Observer, Run
from equipoise.methods import measured_costs
from equipoise.studies.grid import Cell
from equipoise.studies.runner import Display, Tally, run_grid

Planned = Sequence[tuple[Cell, Config]]
#: where a cluster's jobs keep their logs, in the study's folder
JOBS = ".jobs"
CLUSTERS = ("slurm", "local")


def unchecked(run: Run) -> None:
    """Any run may train."""


def dearest_first(planned: Planned) -> list[tuple[Cell, Config]]:
    """Runs by what they cost, the dearest first; runs of equal cost keep their order."""
    return sorted(planned, key=lambda pair: -expected_cost(pair[1]))


def expected_cost(config: Config) -> float:
    """How long a run takes beside others on the same data: local epochs, times what its method costs in each."""
    cost = measured_costs().get(short_name(config.method), {}).get("compute", 1.0)
    return config.train.rounds * (config.train.steps or config.train.epochs) * config.train.participation * cost


# ---- processes ------------------------------------------------------------------------------------------------------


class _Teller:
    """In a process: tells through its own pipe what becomes of its runs."""

    def __init__(self, line: Connection):
        self.line = line

    def started(self, cell: Cell, config: Config) -> Observer:
        self.line.send(("begun", None))
        return self

    def ended(self, cell: Cell, how: str) -> None:
        self.line.send(("ended", how))

    def event(self, event: str, **fields: Any) -> None:
        self.line.send(("event", {"event": event, **fields}))


def _work(line: Connection, device: str, planned: Planned, keep: bool, check: Callable[[Run], None]) -> None:
    """A process: asks for runs by their numbers, and runs one after the other on its device."""
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    outcome = Tally()
    while True:
        line.send(("free", outcome))
        number = line.recv()
        if number is None:
            return
        cell, config = planned[number]
        compute = config.compute.model_copy(update={"device": device})
        try:
            settled = config.model_copy(update={"compute": compute})
            outcome = run_grid([(cell, settled)], _Teller(line), keep=keep, check=check)
        except Exception as problem:  # refused before anything began
            outcome = Tally(failed={cell.label: problem})
        outcome.failed = {label: _sendable(problem) for label, problem in outcome.failed.items()}


def _sendable(problem: Exception) -> Exception:
    """The problem, or its text where another process could not read it: that would end the whole study."""
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:
        return RuntimeError(f"{type(problem).__name__}: {first_line(problem)}")
    return problem


def run_on_devices(
    planned: Planned,
    display: Display,
    devices: Sequence[str],
    keep: bool = False,
    check: Callable[[Run], None] = unchecked,
) -> Tally:
    """Run the unfinished of the runs, each on the next device that is free; gives what came of them.

    Each process has its own pipe. One that dies, be it in the middle of a message, closes its pipe and harms no other.
    """
    if "cpu" in devices and any(config.compute.workers > 1 for _, config in planned):
        raise UserError(
            "--devices gives each run on a CPU one process, and compute.workers asks for more: leave compute.workers "
            "out, and list more places, such as --devices cpu:4"
        )
    planned = dearest_first(planned)
    context = multiprocessing.get_context("spawn")
    waiting, whole, processes = deque(range(len(planned))), Tally(), []
    lines, at, watchers = list[Any](), dict[Any, int](), dict[Any, Observer]()
    for device in devices:
        line, its_end = context.Pipe()
        lines.append(line)
        processes.append(context.Process(target=_work, args=(its_end, device, planned, keep, check), daemon=True))
        processes[-1].start()
        its_end.close()  # so that the pipe ends with the process
    try:
        for line, kind, told in _messages(lines):
            if kind == "free":
                _add(whole, told)
                at.pop(line, None)
                if waiting:
                    at[line] = waiting.popleft()
                with suppress(OSError):  # it has died meanwhile
                    line.send(at.get(line))
            elif kind == "begun":
                watchers[line] = display.started(*planned[at[line]])
            elif kind == "event":
                watchers[line].event(**told)
            else:
                display.ended(planned[at[line]][0], told)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    for number in at.values():  # its process has died, of a lack of memory perhaps
        cell = planned[number][0]
        whole.failed[cell.label] = UserError("its process was ended from outside; the same command goes on")
        display.ended(cell, "failed: its process was ended from outside")
    done = {*whole.finished, *whole.stopped, *whole.busy, *whole.failed}
    whole.stopped += [cell.label for cell, _ in planned if cell.label not in done]
    return whole


def _messages(lines: list[Any]) -> Iterator[tuple[Any, str, Any]]:
    """All that processes tell, each with its pipe, until the last one has ended."""
    while lines:
        ready: list[Any] = wait(lines)
        for line in ready:
            try:
                kind, told = line.recv()
            except (EOFError, OSError):  # OSError: in the middle of a message
                lines.remove(line)
            else:
                yield line, kind, told


def _add(whole: Tally, more: Tally) -> None:
    whole.finished += more.finished
    whole.stopped += more.stopped
    whole.busy += more.busy
    whole.failed |= more.failed


# ---- clusters -------------------------------------------------------------------------------------------------------


class _Silent:
    """A job shows no progress; its log lists the runs that ended."""

    def started(self, cell: Cell, config: Config) -> Observer:
        return self

    def ended(self, cell: Cell, how: str) -> None:
        print(f"{cell.label}: {how}", flush=True)

    def event(self, event: str, **fields: Any) -> None:
        pass


def _job(planned: Planned, keep: bool, check: Callable[[Run], None]) -> Tally:
    """One job of a cluster: works at any run that no other job has taken."""
    return run_grid(planned, _Silent(), keep=keep, check=check)


def cluster_settings(path: Path | None) -> dict[str, Any]:
    """The settings of a cluster's jobs: `jobs`, and submitit's parameters, such as `slurm_partition`."""
    if path is None:
        return {}
    if not path.is_file():
        raise UserError(f"--cluster {path}: there is no such file; it holds jobs = 4, timeout_min = 240 and the like")
    return parse_toml(path.read_bytes(), str(path))


def run_on_cluster(
    planned: Planned, cluster: str, folder: Path, settings: Mapping[str, Any], keep: bool, check: Callable[[Run], None]
) -> Tally:
    """Run the unfinished of the runs as jobs of a cluster, and wait for these.

    Args:
        cluster: slurm, or local for processes of this machine
        folder: the study's folder, which all jobs see
        settings: `jobs`, their number, and submitit's parameters
    """
    submitit = imported("submitit", "cluster", "a study on a cluster")
    parameters = dict(settings)
    number = parameters.pop("jobs", 1)
    if not isinstance(number, int) or number < 1:
        raise UserError(f"jobs = {number!r}: expected the number of jobs, such as 4")
    try:
        executor = submitit.AutoExecutor(folder=folder.resolve() / JOBS, cluster=cluster)
        executor.update_parameters(name=folder.name, **parameters)
    except (NameError, ValueError, RuntimeError, AssertionError) as problem:
        raise UserError(f"{cluster} does not take these settings: {problem}") from None
    ordered = dearest_first(planned)
    jobs = [executor.submit(_job, ordered, keep, check) for _ in range(number)]
    whole = Tally()
    for job in jobs:
        try:
            _add(whole, job.result())
        except Exception as problem:  # a job that was cancelled, or whose machine was lost
            whole.failed[f"job {job.job_id}"] = UserError(f"{problem}; the same command goes on")
    ended = {*whole.finished, *whole.failed}
    whole.busy = [label for label in dict.fromkeys(whole.busy) if label not in ended]
    whole.finished = [*dict.fromkeys(whole.finished)]
    return whole
