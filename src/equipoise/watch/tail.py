"""A log that grows, read on from where it was left; a log that was cut back or begun anew is read from its start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: what is kept of the end of the part that was read, to know it again
KNOWN = 256


class Tail:
    """Reads the new lines of a log of JSON lines.

    Args:
        path: the log, which need not be there yet
        forget: called before the log is read from its start again
    """

    def __init__(self, path: Path, forget: Callable[[], None]):
        self.path, self.forget = path, forget
        self._read, self._last = 0, b""

    def lines(self) -> list[dict[str, Any]]:
        """The lines that were added since the last call; one that is still being written waits for the next call."""
        try:
            with self.path.open("rb") as file:
                if not self._goes_on(file):
                    self._read, self._last = 0, b""
                    self.forget()
                file.seek(self._read)
                new = file.read()
        except OSError:
            if self._read:
                self._read, self._last = 0, b""
                self.forget()
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self._last = (self._last + whole)[-KNOWN:]
        return [event for line in whole.splitlines() if (event := _event(line)) is not None]

    def _goes_on(self, file: Any) -> bool:
        """Whether the file still begins with what was read of it."""
        file.seek(self._read - len(self._last))
        return file.read(len(self._last)) == self._last


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
