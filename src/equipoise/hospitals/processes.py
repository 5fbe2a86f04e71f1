"""Flower's processes. Equipoise starts them, and they end with it, even after a crash."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from equipoise.core.errors import UserError
from equipoise.hospitals.deployment_files import SiteFile, split_address
from equipoise.hospitals.links import Link
from equipoise.hospitals.security import write_secret
from equipoise.hospitals.superlink import SuperLinkSettings, delete_database

STOP_SECONDS = 5.0
START_SECONDS = 60.0


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(address: str) -> None:
    """Refuse an address that this machine cannot listen at."""
    host, port = split_address(address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise UserError(f"cannot listen at {address}: {reason}; end what runs there, or choose another") from None


class Child:
    """A process in a separate session, with its output in a file; it ends with this process, even by kill -9 on
    Linux."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        # Flower would open further ports, or log in elsewhere, if its environment told it to.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, **(environment or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - one system call
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self.process.poll() is None

    def said(self) -> str:
        """All of its log; a process that is started again goes on in the same one."""
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 5) -> str:
        """The end of its log."""
        return "\n".join(self.said().splitlines()[-lines:])

    def stop(self) -> None:
        """End the process and all that it started: politely, then not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self.process.poll()


def _die_with_parent() -> None:
    """Ask Linux to end this process, politely, when the one that started it is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def spare_loopback_the_proxy() -> None:
    """Connections to this machine never go through a hospital's proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))


def flower_environment(home: Path) -> dict[str, str]:
    """No telemetry, no look for updates, and Flower's files in our folder."""
    return {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


@contextlib.contextmanager
def started_superlink(settings: SuperLinkSettings) -> Iterator[Child]:
    """The SuperLink of a consortium as a process; its secrets and its database end with the block."""
    folder = Path(settings.folder)
    file = folder / "superlink.json"
    write_secret(file, settings.to_json().encode())
    command = [sys.executable, "-m", "equipoise.hospitals.superlink", str(file)]
    try:
        with Child(command, folder / "superlink.log", flower_environment(folder)) as child:
            yield child
    finally:
        file.unlink(missing_ok=True)
        delete_database(folder)  # where the process had no time for it


def start_supernode(settings: SiteFile, insecure: bool, port: int, secret: Path) -> Child:
    """The SuperNode of a site: connects out to the SuperLink, listens on loopback only."""
    home = settings.state / "flower"
    command = [sys.executable, "-m", "equipoise.hospitals.node", str(settings.poll)]
    command += ["--superlink", settings.superlink, "--isolation", "process"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--superexec-auth-secret-file", str(secret)]
    if insecure:
        command += ["--insecure"]
    else:
        command += ["--root-certificates", str(settings.ca), "--auth-supernode-private-key", str(settings.key)]
    return Child(command, home / "supernode.log", flower_environment(home))


def wait_until_healthy(link: Link, child: Child, what: str) -> None:
    """Wait until a process that we started answers; say what it said if it does not."""
    deadline = time.monotonic() + START_SECONDS
    problem: str | None = "it did not start"
    while time.monotonic() < deadline and child.running:
        problem = link.healthy()
        if problem is None:
            return
        if "certificate verify failed" in problem:  # no patience mends this
            break
        time.sleep(0.2)
    state = f"does not answer ({problem})" if child.running else f"ended with status {child.process.returncode}"
    raise UserError(f"{what} {state}; the end of {child.log}:\n{child.tail()}")


class _ChildEnded(BaseException):
    """A process that a block needs has ended; no `Exception`, so that nothing on the way takes it for its own."""


@contextlib.contextmanager
def interrupted_by_end_of(child: Child, what: str) -> Iterator[None]:
    """Leave the block, in words, when a process that it needs ends: Flower would try to reach it for ever.

    Uses a separate signal: a process that scripts start in the background does not hear SIGINT.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if not child.running:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                return

    def leave(*_: object) -> None:
        if not over.is_set():
            raise _ChildEnded

    before = signal.signal(signal.SIGUSR1, leave)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except _ChildEnded:
        status = child.process.returncode
        raise UserError(
            f"{what} ended with status {status} while it was needed; `--resume` goes on after the last complete round; "
            f"the end of {child.log}:\n{child.tail()}"
        ) from None
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, before)
