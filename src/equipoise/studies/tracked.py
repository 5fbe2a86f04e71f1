"""Trackers of a study: each of its runs is watched as `equipoise run` would have it watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.contract.config import Config
from equipoise.engine.loop import Observer
from equipoise.engine.tracking import FAILED, FINISHED, KILLED, Trackers
from equipoise.studies.grid import Cell
from equipoise.studies.runner import Display


class TrackedGrid:
    """A display of a grid with trackers beside it, for each run its own; one that fails gets no later run."""

    def __init__(self, display: Display, names: Sequence[str]):
        self._display = display
        self._names = list(names)
        self._running: dict[str, Trackers] = {}

    def __enter__(self) -> TrackedGrid:
        return self

    def __exit__(self, *how: Any) -> None:
        for trackers in self._running.values():  # an interruption leaves some
            trackers.__exit__(*how)

    def started(self, cell: Cell, config: Config) -> Observer:
        """A run begins or goes on; gives what watches it."""
        watcher = self._display.started(cell, config)
        self._running[cell.label] = Trackers(self._names, cell.folder)
        return Both(watcher, self._running[cell.label])

    def ended(self, cell: Cell, how: str) -> None:
        """A run is finished, has stopped or failed."""
        if trackers := self._running.pop(cell.label, None):  # none where the run could not even begin
            stopped = FAILED if how.startswith("failed") else KILLED
            trackers.close(FINISHED if trackers.ended else stopped)
            self._names = [name for name in self._names if name not in trackers.lost()]
        self._display.ended(cell, how)


@dataclass(frozen=True)
class Both:
    """Two observers as one."""

    first: Observer
    second: Observer

    def event(self, event: str, **fields: Any) -> None:
        """Tell both."""
        self.first.event(event, **fields)
        self.second.event(event, **fields)
