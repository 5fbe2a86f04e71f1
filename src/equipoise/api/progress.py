"""What a user sees while a run goes on: a bar with the time left, a line per round, warnings.

The bar appears with the run's first event: input that is refused has painted nothing.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

#: columns of a terminal that has room for words beside the numbers
ROOMY = 60


class _Label(TextColumn):
    """A label that gives way to the numbers beside it: a narrow terminal cuts it."""

    def render(self, task: Task) -> Text:
        """The label in one line."""
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


def bars(console: Console, title: str) -> Progress:
    """Bars whose unit is a round, with the time that has passed and the time left; `title` in rich's markup."""
    words = console.width >= ROOMY
    columns: list[ProgressColumn] = [_Label(title, table_column=Column(min_width=8)), BarColumn(), MofNCompleteColumn()]
    columns += [TextColumn("rounds"), TimeElapsedColumn(), TextColumn("left")] if words else []
    return Progress(*columns, TimeRemainingColumn(), console=console)


class ProgressDisplay:
    """An observer of a run that draws to a console, a terminal's or a notebook's.

    Args:
        metric: the score whose means are shown
        shown: whether anything is drawn
    """

    def __init__(self, console: Console, rounds: int, metric: str, label: str, shown: bool = True):
        self.console = console
        self.shown = shown
        self.scores: dict[str, list[float]] = {}
        self.metric = metric
        self.progress = bars(console, "[bold]{task.description}")
        self.task = self.progress.add_task(escape(label), total=rounds)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress.live.is_started:
            self.progress.stop()

    def event(self, event: str, **fields: Any) -> None:
        """Show what concerns a person."""
        handler = getattr(self, f"_on_{event}", None)
        if handler is not None and self.shown:
            handler(fields)

    def _on_start(self, fields: dict[str, Any]) -> None:
        for warning in fields["warnings"]:
            self.console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)
        self.progress.start()

    def _on_resumed(self, fields: dict[str, Any]) -> None:
        self.progress.start()
        self.progress.update(self.task, completed=fields["round"])
        self.console.print(f"resumed after round {fields['round']}")

    def _on_round(self, fields: dict[str, Any]) -> None:
        self._show_scores()
        losses = [f"{escape(site)} {facts['loss']:.3f}" for site, facts in fields["sites"].items() if "loss" in facts]
        more = f" and {len(losses) - 8} more" if len(losses) > 8 else ""
        told = f"loss  {'  '.join(losses[:8])}{more}" if losses else "loss not told"
        self.console.print(f"round {fields['round']:>4}  {told}", highlight=False)
        for site, why in fields["missing"].items():
            who = f"[yellow]round {fields['round']}: {escape(site)} left out:[/]"
            self.console.print(f"{who} {escape(why)}", highlight=False)
        self.progress.update(self.task, completed=fields["round"])

    def _on_evaluation(self, fields: dict[str, Any]) -> None:
        value = fields["metrics"].get(self.metric)
        if fields["part"] == "valid" and value is not None:
            self.scores.setdefault(fields["view"], []).append(value)

    def _on_selection(self, fields: dict[str, Any]) -> None:
        self._show_scores()
        by = f"{fields['rule']}, {fields['metric']} on validation"
        if fields["rule"] == "best" and "value" not in fields:
            by = "the last: there are no validation images to choose by"
        self.console.print(f"selected round {fields['round']} ({by})")

    def _on_warning(self, fields: dict[str, Any]) -> None:
        self.console.print(f"[yellow]warning:[/] {escape(fields['text'])}", highlight=False)

    def _show_scores(self) -> None:
        if self.scores:
            means = "  ".join(f"{view} {sum(v) / len(v):.1%}" for view, v in self.scores.items())
            self.console.print(f"            {self.metric.replace('_', ' ')} on validation: {means}", highlight=False)
        self.scores = {}
