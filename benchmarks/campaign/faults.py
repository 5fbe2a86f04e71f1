"""The faults of a campaign: each is drawn from the campaign's seed and its own number, so that it can be repeated."""

from __future__ import annotations

import errno
import json
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from campaign.places import Postbox, World, differing
from equipoise.contract.protocol import SiteFailure
from equipoise.core.errors import is_users
from equipoise.hospitals.office import StateLost
from equipoise.hospitals.parcels import Parcel, open_parcel, prepare, seal

#: where each kind of fault can happen
KINDS: dict[str, tuple[str, ...]] = {
    "crash": ("process", "workers", "flower"),
    "kill": ("process", "workers", "flower"),
    "disk": ("process", "workers", "flower"),
    "damage": ("process", "flower"),
    "clock": ("process", "workers", "flower"),
    "drop": ("flower",),
    "slow": ("flower",),
    "lies": ("flower",),
}
#: how a fault may end without harm, and how not
GOOD = ("same bits", "refused in words", "left out and reported")
BAD = ("lost", "differing bits", "silent lie", "traceback")
#: begins the words of a run that no user could understand
UNEXPECTED = "traceback: "
#: seconds after which a run hangs
LONGEST = 900


@dataclass(frozen=True)
class Fault:
    """One fault: what breaks where; `draw` says when and how."""

    seed: int
    number: int
    kind: str
    place: str
    method: str

    @property
    def draw(self) -> random.Random:
        """A stream of random numbers that this fault alone has."""
        return random.Random(f"{self.seed}/{self.number}")


class Crash(BaseException):
    """The program dies here."""


def faults(seed: int, number: int, methods: list[str], kinds: list[str]) -> Iterator[Fault]:
    """So many faults of these kinds on these methods, in turn."""
    for index in range(number):
        draw = random.Random(f"{seed}/{index}/what")
        kind = kinds[index % len(kinds)]
        yield Fault(seed, index, kind, draw.choice(KINDS[kind]), draw.choice(methods))


# ---- interruptions at a file operation ------------------------------------------------------------------------------

#: called with the path of every file operation that changes something
_watcher: Callable[[str], None] | None = None
#: events of Python's audit log that change files
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watcher is None:
        return
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event in CHANGES:
        _watcher(os.fspath(arguments[0]) if isinstance(arguments[0], str | os.PathLike) else "")


sys.addaudithook(_audit)


@contextmanager
def watching(folder: Path, watcher: Callable[[int], None]) -> Iterator[None]:
    """Call `watcher` with 1, 2, ... before each operation that changes a file in the folder."""
    global _watcher  # noqa: PLW0603 - an audit hook stays for ever, and has to know whether it is wanted
    count, inside = 0, str(folder)

    def seen(path: str) -> None:
        nonlocal count
        if path.startswith(inside):
            count += 1
            watcher(count)

    _watcher = seen
    try:
        yield
    finally:
        _watcher = None


def operations(world: World) -> int:
    """How many operations that change files a whole run has."""
    counted = [0]
    with watching(world.folder, lambda number: counted.__setitem__(0, number)):
        world.go()
    return counted[0]


def interrupt(fault: Fault, world: World, operations: int) -> None:
    """Run until the drawn file operation, and break it: crash, kill (of a worker, too) or full disk."""
    draw = fault.draw
    chosen, worker = 1 + draw.randrange(operations), draw.random() < 0.5
    main, full = os.getpid(), mmap.mmap(-1, 1)  # one byte that worker processes share

    def strike(number: int) -> None:
        if os.getpid() == main and number == chosen:
            full[0] = 1
        elif not full[0] or fault.kind != "disk":
            return
        if fault.kind == "disk":  # and it stays full, for workers as well
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault.kind == "crash":
            raise Crash
        workers = multiprocessing.active_children()
        os.kill((workers[0].pid if workers and worker else None) or main, signal.SIGKILL)

    with watching(world.folder, strike):
        world.go()


# ---- damage ---------------------------------------------------------------------------------------------------------


def damage(fault: Fault, world: World) -> str:
    """Break one file of an interrupted run; says which and how."""
    draw = fault.draw
    draw.random()
    files = sorted(path for path in world.folder.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return "nothing: the run was broken off before it wrote anything"
    path = draw.choice(files)
    content = bytearray(path.read_bytes())
    how = draw.choice(("bit", "bit", "bit", "cut", "empty", "gone", "longer", "folder"))
    if how == "bit":
        place = draw.randrange(len(content))
        content[place] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    elif how == "longer":
        path.write_bytes(content + bytes(draw.randrange(1, 64)))
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
    return f"{how}: {path.relative_to(world.folder)}"


# ---- the clock ------------------------------------------------------------------------------------------------------


@contextmanager
def wrong_clock(fault: Fault) -> Iterator[None]:
    """The clock of the day jumps back and forth; the one that only counts on does not."""
    draw, true = fault.draw, time.time
    time.time = lambda: true() + draw.choice((-86_400.0, 0.0, 3600.0, 1e9))
    try:
        yield
    finally:
        time.time = true


# ---- messages -------------------------------------------------------------------------------------------------------


def _scaled(factor: float) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def lie(payload: dict[str, Any], header: dict[str, Any]) -> None:
        for name, value in payload.items():
            if isinstance(value, dict):
                payload[name] = {key: t * factor if t.is_floating_point() else t for key, t in value.items()}

    return lie


def _spoilt(value: float) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def lie(payload: dict[str, Any], header: dict[str, Any]) -> None:
        for tensors in (value for value in payload.values() if isinstance(value, dict)):
            next(t for t in tensors.values() if t.is_floating_point()).view(-1)[0] = value

    return lie


def _forged(payload: dict[str, Any], header: dict[str, Any]) -> None:
    for counts in header["measures"].values():
        size = len(counts["confusion"][1])
        counts["confusion"][1] = [[50 * (row == column) for column in range(size)] for row in range(size)]


def _smaller(payload: dict[str, Any], header: dict[str, Any]) -> None:
    for name, value in payload.items():
        if isinstance(value, dict):
            payload[name] = {key: t.flatten()[:1] for key, t in value.items()}


LIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "NaN": _spoilt(float("nan")),
    "infinity": _spoilt(float("inf")),
    "1e30": _spoilt(1e30),
    "times 200": _scaled(200.0),
    "times -1e4": _scaled(-1e4),
    "other shapes": _smaller,
    "all right": _forged,
    "more entries": lambda payload, header: payload.update(patients=12),
    "many images": lambda payload, header: payload.update({k: 10**9 for k in payload if k == "examples"}),
    "another message": lambda payload, header: header.update(identity="0" * 16),
    "loss of 1e300": lambda payload, header: header["facts"].update(loss=1e300),
    "nothing": lambda payload, header: payload.clear(),
}


def disturbed(fault: Fault) -> type[Postbox]:
    """A post that loses, delays or falsifies one reply."""
    draw = fault.draw
    site, number = f"site {draw.randint(1, 3)}", draw.randint(1, 2)
    name = draw.choice([*LIES])

    class Disturbed(Postbox):
        struck = False

        def exchange(self, parcels: Any, timeout: float) -> Any:
            if fault.kind != "slow":
                return super().exchange(parcels, timeout)
            order = draw.sample(range(len(parcels)), len(parcels))  # replies come in any order
            found = {place: self.carry(*parcels[place]) for place in order}
            return [found[place] for place in range(len(parcels))]

        def carry(self, receiver: str, parcel: Parcel) -> Any:
            reply = super().carry(receiver, parcel)
            header = parcel.header
            due = receiver == site and header.get("round") == number and header["action"] == "train"
            if fault.kind == "slow" or not due or self.struck or isinstance(reply, SiteFailure):
                return reply
            type(self).struck = True
            if fault.kind == "drop":
                return SiteFailure("no answer within 1 s")
            payload, _ = open_parcel(reply)
            told = {key: reply.header[key] for key in ("identity", "kept", "measures", "facts")}
            told = json.loads(json.dumps(told))
            LIES[name](payload, told)
            return seal(prepare(payload), **told)

    Disturbed.site, Disturbed.name = site, name  # type: ignore[attr-defined]
    return Disturbed


# ---- verdicts -------------------------------------------------------------------------------------------------------


def judge(fault: Fault, folder: Path, reference: dict[str, Any], operations: int) -> tuple[str, str]:
    """Let a fault happen, go on after it, and say how that ended, with details."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LONGEST)
    try:
        if fault.kind in ("drop", "slow", "lies"):
            return _by_message(fault, folder, reference)
        return _by_interruption(fault, folder, reference, operations)
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt):
            raise
        words = f"{type(problem).__name__}: {problem}"
        return ("refused in words" if fault.kind == "damage" and _in_words(problem) else "traceback"), words
    finally:
        signal.alarm(0)


def _in_words(problem: BaseException) -> bool:
    """Whether users read a sentence, the operator's of a hospital included."""
    return is_users(problem) or isinstance(problem, StateLost)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"no end after {LONGEST} s")


def _by_message(fault: Fault, folder: Path, reference: dict[str, Any]) -> tuple[str, str]:
    post = disturbed(fault)
    repeated = fault.kind == "drop" and fault.draw.random() < 0.5
    world = World(fault.place, fault.method, folder, post, *(("train.min_sites=3",) if repeated else ()))
    world.go()
    about = "" if fault.kind == "slow" else f"{post.site} {post.name if fault.kind == 'lies' else ''}"  # type: ignore[attr-defined]
    if not differing(reference, world.left()):
        return "same bits", about
    if any(post.site in event["missing"] for event in world.told()):  # type: ignore[attr-defined]
        return "left out and reported", about
    return ("silent lie" if fault.kind == "lies" else "differing bits"), about


def _by_interruption(fault: Fault, folder: Path, reference: dict[str, Any], operations: int) -> tuple[str, str]:
    world, about = World(fault.place, fault.method, folder), ""
    if fault.kind == "clock":
        with wrong_clock(fault):
            world.go()
    else:
        striking = replace(fault, kind="crash") if fault.kind == "damage" else fault
        words = _struck(striking, world, operations)
        if words.startswith(UNEXPECTED):
            return "traceback", words
        about = damage(fault, world) if fault.kind == "damage" else words
        if differing_end := _go_on(world):
            refused = fault.kind == "damage"
            return ("refused in words" if refused else "lost"), f"{about}; {differing_end}"
    number = differing(reference, world.left())
    return ("differing bits", f"{number} differ; {about}") if number else ("same bits", about)


def _struck(fault: Fault, world: World, operations: int) -> str:
    """Let an interruption happen in a process of its own; gives the words that the run ended with."""
    told = world.folder.with_suffix(".words")
    child = os.fork()
    if child == 0:
        words = ""
        try:
            interrupt(fault, world, operations)
        except Crash:
            words = ""
        except BaseException as problem:
            words = f"{type(problem).__name__}: {problem}"
            words = words if is_users(problem) or "No space" in words else UNEXPECTED + words
        told.write_text(words)
        os._exit(0)
    try:
        os.waitpid(child, 0)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    words = told.read_text() if told.exists() else ""
    told.unlink(missing_ok=True)
    return words


def _go_on(world: World) -> str:
    """Resume, as a user would; gives the words of a refusal."""
    try:
        World(world.place, world.method, world.folder).go(resume=True)
    except BaseException as problem:
        if is_users(problem):
            return str(problem)
        raise
    return ""


def fresh(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


torch.set_num_threads(1)
