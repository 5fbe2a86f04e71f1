"""A commit, or a folder with uncommitted work, and the processes that run its command lines."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from queue import Empty, Queue
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
#: one thread a process, as the engine's workers have; a wide terminal without colours cuts no table
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}


class Failed(Exception):
    """The comparison itself cannot go on."""


class Killed(Failed):
    """A process ended without an answer: from outside, or by a crash that leaves no trace."""


def git(repository: Path, *arguments: str) -> bytes:
    """The output of a git command."""
    done = subprocess.run(["git", "-C", str(repository), *arguments], check=False, capture_output=True)
    if done.returncode:
        raise Failed(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


@dataclass(frozen=True)
class Source:
    """The files of one side."""

    root: Path
    title: str
    #: the commit; empty for a folder, whose content may change
    commit: str = ""

    def studies(self) -> list[dict[str, Any]]:
        """The studies that come with the package, wherever it keeps them: what has rows."""
        tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in (self.root / "src").rglob("*.toml")]
        found = [table for table in tables if "row" in table]
        if not found:
            raise Failed(f"{self.title} has no studies to take switches from")
        return sorted(found, key=lambda study: str(study["name"]))


def checked_out(name: str, repository: Path, scratch: Path) -> Source:
    """The files of a revision, in a new folder; the folder itself where the name is a path."""
    if Path(name).is_dir():
        return Source(Path(name).resolve(), str(Path(name)))
    commit = git(repository, "rev-parse", "--verify", f"{name}^{{commit}}").decode().strip()
    folder = scratch / f"source-{commit[:12]}"
    if not folder.exists():
        with tarfile.open(fileobj=io.BytesIO(git(repository, "archive", commit))) as archive:
            archive.extractall(folder, filter="data")
    return Source(folder, f"{name} ({commit[:10]})", commit)


def machine() -> str:
    """Identifies all that decides bits besides the code: the processor, the system and the libraries."""
    processors = Path("/proc/cpuinfo")
    lines = processors.read_text().splitlines() if processors.exists() else []
    model = next((line for line in lines if line.startswith("model name")), platform.processor())
    known = [model, platform.system(), platform.machine(), platform.python_version()]
    known += [f"{name} {version(name)}" for name in ("torch", "numpy", "pillow", "scipy")]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:12]


class Process:
    """A process that runs command lines of one side, one after the other."""

    def __init__(self, source: Source, log: Path):
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(source.root / "src")}
        self._log = log.open("ab")
        self._child = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=log.parent,
            text=True,
        )

    def ask(self, job: dict[str, Any]) -> tuple[int, str] | None:
        """Exit status and output of a job; None where the process ended meanwhile."""
        assert self._child.stdin and self._child.stdout
        try:
            print(json.dumps(job), file=self._child.stdin, flush=True)
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            return None
        if not answer:
            return None
        found = json.loads(answer)
        return found["status"], found["text"]

    def close(self) -> None:
        """End the process."""
        assert self._child.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._child.stdin.close()
        self._child.wait()
        self._log.close()


class Side:
    """A source with some processes, which take jobs as they become free."""

    def __init__(self, source: Source, log: Path, processes: int):
        self.source, self._log = source, log
        self._free: Queue[Process] = Queue()
        self._all: list[Process] = []
        self._threads = ThreadPoolExecutor(processes)

    def run(self, *arguments: str | Path, spawn: bool = False) -> Future[tuple[int, str]]:
        """A command line: its exit status and output, later."""
        return self._submit({"argv": [str(argument) for argument in arguments], "spawn": spawn})

    def exported(self, model: Path, pixels: Path) -> Future[tuple[int, str]]:
        """What an exported model says of images, later."""
        return self._submit({"exported": [str(model), str(pixels)]})

    @functools.cached_property
    def insists(self) -> list[str]:
        """What makes `run` begin even where a method's distinctive part cannot act; early commits always did."""
        return ["--anyway"] if "--anyway" in self.said("run", "--help") else []

    def said(self, *arguments: str | Path) -> str:
        """The output of a command line that has to succeed."""
        status, text = self.run(*arguments).result()
        if status:
            raise Failed(f"{self.source.title}: `equipoise {' '.join(map(str, arguments))}` failed:\n{text}")
        return text

    def _submit(self, job: dict[str, Any]) -> Future[tuple[int, str]]:
        return self._threads.submit(self._perform, job)

    def _perform(self, job: dict[str, Any]) -> tuple[int, str]:
        process = self._idle()
        answer = process.ask(job)
        if answer is None:  # another process does the next job
            raise Killed(f"{self.source.title}: a process ended during {job}: {self._log.read_text()[-2000:]}")
        self._free.put(process)
        return answer

    def _idle(self) -> Process:
        """A process that has nothing to do; there are never more than threads that ask for one."""
        try:
            return self._free.get_nowait()
        except Empty:
            self._all.append(Process(self.source, self._log))
            return self._all[-1]

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()


@contextlib.contextmanager
def running(source: Source, log: Path, processes: int) -> Iterator[Side]:
    """A side whose processes end with the block."""
    side = Side(source, log, processes)
    try:
        yield side
    finally:
        side.close()
