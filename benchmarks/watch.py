"""What a command costs, seen from outside: wall and CPU seconds and peak memory of all its processes. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
INTERVAL = 0.1
GRACE = 20.0  # seconds that helper processes get to end after the command


@dataclass
class Usage:
    """What a command took. `memory_gb` adds up resident memory; `anonymous_gb` leaves out file pages, which may be
    counted once per process though they lie in memory once."""

    code: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_gb: float = 0.0
    anonymous_gb: float = 0.0
    seen_cpu_s: dict[int, float] = field(default_factory=dict, repr=False)


def watch(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Usage:
    """Run a command to its end, and that of the processes it leaves behind; its output goes to a file.

    CPU seconds are the larger of what the kernel booked for every process that was waited for, and what was seen
    while they ran: a process whose parent does not wait for it is missing from the former.
    """
    # Orphans become children of this process instead of escaping from its view.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    usage, booked, began = Usage(), 0.0, time.perf_counter()
    with log.open("wb") as output:
        command_id = subprocess.Popen(command, stdout=output, stderr=output, env=environment).pid
    ended = 0.0
    while True:
        try:
            pid, status, spent = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid:
            booked += spent.ru_utime + spent.ru_stime
            if pid == command_id:
                usage.code, ended = os.waitstatus_to_exitcode(status), time.perf_counter()
                usage.wall_s = ended - began
            continue
        family = _descendants()
        _look(usage, family)
        if ended and time.perf_counter() - ended > GRACE:
            for straggler in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(straggler, signal.SIGKILL)
        time.sleep(INTERVAL)
    usage.cpu_s = max(booked, sum(usage.seen_cpu_s.values()))
    return usage


def _descendants() -> list[int]:
    """The processes that descend from this one."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, front = [], [os.getpid()]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        found += front
    return found


def family_cpu() -> float:
    """CPU seconds of the processes that descend from this one, and of those they have waited for."""
    fields = [found for pid in _descendants() if (found := _stat(pid))]
    return sum(int(value) for found in fields for value in found[11:15]) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold spaces; none if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _look(usage: Usage, family: Sequence[int]) -> None:
    """Note what each process has used up to now."""
    ticks, total, anonymous = os.sysconf("SC_CLK_TCK"), 0, 0
    for pid in family:
        fields = _stat(pid)
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        sizes = {
            name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
        }
        if fields:
            usage.seen_cpu_s[pid] = (int(fields[11]) + int(fields[12])) / ticks
        total += sizes.get("VmRSS", 0)
        anonymous += sizes.get("RssAnon", 0)
        # The kernel's own high-water mark of a single process misses nothing between two looks.
        usage.memory_gb = max(usage.memory_gb, sizes.get("VmHWM", 0) / 2**20)
    usage.memory_gb = max(usage.memory_gb, total / 2**20)
    usage.anonymous_gb = max(usage.anonymous_gb, anonymous / 2**20)
