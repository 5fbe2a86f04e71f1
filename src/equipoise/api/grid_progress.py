"""What a user sees while a study runs: a bar over the whole grid, one for each run in progress, a line per end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from equipoise.api.progress import bars
from equipoise.contract.config import Config
from equipoise.studies.checks import is_finished
from equipoise.studies.grid import Cell


class GridProgress:
    """Draws the progress of a grid of runs; the unit is a round."""

    def __init__(self, console: Console, cells: Sequence[tuple[Cell, Config]]):
        self.console = console
        self.progress = bars(console, "{task.description}")
        self.total = sum(config.train.rounds for _, config in cells)
        done = sum(config.train.rounds for cell, config in cells if is_finished(cell.folder))
        self.whole = self.progress.add_task(
            f"[bold]{len(cells)} {'run' if len(cells) == 1 else 'runs'}", total=self.total, completed=done
        )
        self.lines: dict[str, RunLine] = {}
        self.warned: set[str] = set()
        self.told: set[str] = set()

    def __enter__(self) -> GridProgress:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def started(self, cell: Cell, config: Config) -> RunLine:
        """A bar for a run that begins or goes on."""
        task = self.progress.add_task(escape(cell.label), total=config.train.rounds)
        self.lines[cell.label] = RunLine(self, cell.label, task, config)
        return self.lines[cell.label]

    def ended(self, cell: Cell, how: str) -> None:
        """Take the run's bar away and say how it ended."""
        line = self.lines.pop(cell.label)
        self.progress.remove_task(line.task)
        missing = line.rounds - line.done
        if how == "finished":  # elsewhere, if rounds are missing
            self.progress.advance(self.whole, missing)
        else:  # they are not for this process to do
            self.total -= missing
            self.progress.update(self.whole, total=self.total)
        score = line.score if how == "finished" else ""
        if how.startswith("failed: ") and how in self.told:
            how = "failed, too"
        self.told.add(how)
        self.console.print(f"[bold]{escape(cell.label)}[/] {escape(how)}{score}", highlight=False)

    def warn(self, text: str) -> None:
        """Print a warning, once for all runs."""
        if text not in self.warned:
            self.warned.add(text)
            self.console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False)


class RunLine:
    """Watches one run for its bar."""

    def __init__(self, display: GridProgress, label: str, task: TaskID, config: Config):
        self.display = display
        self.label = label
        self.task = task
        self.rounds, self.done = config.train.rounds, 0
        self.metric = config.evaluation.metric
        self.score = ""

    def event(self, event: str, **fields: Any) -> None:
        """Show what concerns a person."""
        progress = self.display.progress
        if event in ("start", "warning"):
            for text in fields.get("warnings", [fields.get("text", "")]):
                self.display.warn(text)
        elif event in ("resumed", "round"):
            progress.advance(self.display.whole, fields["round"] - self.done)
            self.done = fields["round"]
            progress.update(self.task, completed=self.done)
        elif event == "selection" and fields.get("value") is not None:
            metric = self.metric.replace("_", " ")
            self.score = f", round {fields['round']}, {metric} on validation {fields['value']:.1%}"
