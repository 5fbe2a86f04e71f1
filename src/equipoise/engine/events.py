"""`events.jsonl`: a line per round and per evaluation, the truth that reports are made from."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from equipoise.core.errors import UserError


class EventLog:
    """Appends events to a file; a resumed run cuts the file back to its last complete round."""

    def __init__(self, path: Path, size: int | None = None, checksum: str = ""):
        self._sum = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if size is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.stat().st_size < size:
            raise UserError(
                f"{path} is missing or shorter than its checkpoint says: this run cannot go on; start it anew elsewhere"
            )
        else:
            os.truncate(path, size)
            self._sum = zlib.crc32(path.read_bytes())
            if checksum and checksum != self.checksum():
                raise UserError(
                    f"{path} is damaged: it does not hold what the run wrote. Put a copy in its place, or start the "
                    "run anew elsewhere"
                )
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        line = json.dumps(_finite({"event": event, **fields}), ensure_ascii=False) + "\n"
        self._file.write(line)
        self._file.flush()
        self._sum = zlib.crc32(line.encode(), self._sum)

    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self._file.fileno()).st_size

    def checksum(self) -> str:
        """A number that changes with any damaged byte of what was written so far."""
        return f"{self._sum:08x}"

    def settle(self) -> None:
        """Wait until the log lies on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def events_in(content: bytes) -> Iterator[dict[str, Any]]:
    """The events of a log; a line that an interruption has cut off is left out."""
    for line in content.splitlines():
        event = read_event(line)
        if event is not None:
            yield event


#: bytes at the end of a log that are read to find its last line, before all of it is
TAIL = 1 << 16


def last_kind(path: Path) -> str:
    """The kind of the last readable event of a log ("round", "end" ...); empty without one. Reads little of a log."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for length in (min(TAIL, size), size):
            file.seek(size - length)
            lines = file.read().splitlines()[0 if length == size else 1 :]
            found = next((event for event in map(read_event, reversed(lines)) if event is not None), None)
            if found is not None:
                return str(found.get("event", ""))
    return ""


def first_event(path: Path) -> dict[str, Any]:
    """The event that started a run.

    Raises:
        UserError: where the file does not begin with one
    """
    with path.open("rb") as file:
        event = read_event(file.readline())
    if event is None or event.get("event") != "start":
        raise UserError(
            f"{path} is damaged: its first line does not tell how the run started; take it from a copy of the run"
        )
    return event


def read_event(line: bytes) -> dict[str, Any] | None:
    """The event in a line; None where there is no whole one."""
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError):  # perhaps a number that only the slower parser reads
        try:
            event = json.loads(line)
        except ValueError:
            return None
    return event if isinstance(event, dict) else None


def _finite(value: Any) -> Any:
    """JSON has no NaN: such numbers become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
