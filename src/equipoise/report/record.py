"""A run folder as typed values: its `config.toml` and its `events.jsonl`, the truth that reports are made from."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from equipoise.core.errors import UserError, as_text
from equipoise.report.events import Evaluation, Event, Result, Round, Selection, SiteCounts, Start, View
from equipoise.report.validation import validation_results

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class RunRecord:
    """Everything a report needs to know about one run."""

    folder: Path
    config_text: str
    start: Start
    rounds: Sequence[Round]
    evaluations: Sequence[Evaluation]
    selections: Sequence[Selection]
    finals: Sequence[Result]
    warnings: Sequence[str]
    resumed: Sequence[int]
    seconds: float | None

    @property
    def finished(self) -> bool:
        """True when the run came to its end and wrote its test results, where there is test data."""
        return self.seconds is not None

    @property
    def last_round(self) -> int:
        """The last completed round, 0 before the first."""
        return self.rounds[-1].round if self.rounds else 0

    @property
    def planned_rounds(self) -> int | None:
        """The rounds asked for in the config, where it says so."""
        rounds = setting(self.start.config, "train", "rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def status(self) -> str:
        """Whether the run is finished, where it stands if not, and where it was resumed."""
        if self.finished:
            text = f"finished after {self.last_round} round{'' if self.last_round == 1 else 's'}"
        else:
            planned = f" of {self.planned_rounds}" if self.planned_rounds else ""
            text = f"not finished: stopped, or still running, after round {self.last_round}{planned}"
        if self.resumed:
            text += "; resumed at round " + ", ".join(str(number) for number in self.resumed)
        return text

    @property
    def training_sites(self) -> list[SiteCounts]:
        """The sites that train, in the order of the run."""
        return [site for site in self.start.sites if sum(site.train)]

    @property
    def has_test_data(self) -> bool:
        """True when a site, a common set or a cohort has an image to test on."""
        return any(sum(site.test) for site in self.start.sites)

    @property
    def evaluators(self) -> list[str]:
        """The places where models are only measured."""
        return [site.name for site in self.start.sites if not sum(site.train)]

    @property
    def end_view(self) -> View:
        """The view a site is left with when a round ends: personal where the method has it, else global."""
        return "personal" if any(e.view == "personal" for e in self.finals) else self.round_view

    @property
    def round_view(self) -> View:
        """The view whose scores tell how rounds went: personal where rounds measured it, else global.

        Personal models that sites make by fine-tuning may be measured only at the end.
        """
        return "personal" if any(e.view == "personal" for e in self.evaluations) else "global"

    @property
    def selection(self) -> Selection | None:
        """Which round was chosen; None before the end."""
        return self.selections[-1] if self.selections else None

    @property
    def selected_round(self) -> int | None:
        """The round that is reported; None where each site has its own, or none is chosen yet."""
        return None if self.selection is None or self.selection.sites else self.selection.round

    @cached_property
    def validation(self) -> Sequence[Result]:
        """Validation scores as results, of what is reported, and of the latest round while nothing is chosen."""
        settings = setting(self.start.config, "evaluation") or {}
        return list(validation_results(self.evaluations, self.selection, settings))

    @cached_property
    def results(self) -> Sequence[Result]:
        """The test results, or, where there are none, validation scores of the models that sites are left with."""
        return self.finals or [r for r in self.validation if r.view != "trained" and r.scope != "pooled"]


def setting(config: dict[str, Any], *path: str) -> Any:
    """The value under a path of keys, None when absent."""
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def read_run(path: Path) -> RunRecord:
    """Read a run folder; a run that is not finished, or was cut off in a line, is read as far as it goes."""
    path = Path(path)
    source = path / "events.jsonl"
    if not source.is_file():
        raise UserError(f"{path} is not a run folder: it has no events.jsonl. Name a folder made by `equipoise run`.")
    events, notes = _read_lines(source)
    by_kind: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, event in events:
        by_kind.setdefault(str(event.get("event")), []).append((number, event))

    def parsed(kind: str, model: type[E]) -> list[E]:
        return [_parse(source, number, kind, model, event) for number, event in by_kind.get(kind, [])]

    starts = parsed("start", Start)
    if not starts:
        raise UserError(f"{source} has no start event: the run has not begun. Run it, or wait for its first lines.")
    config_file = path / "config.toml"
    config_text = as_text(config_file.read_bytes(), str(config_file)) if config_file.is_file() else ""
    start = starts[0]
    if not start.config and config_text:
        start = start.model_copy(update={"config": _parse_toml(config_file, config_text)})
    # A resumed run writes again what it had written after its last checkpoint: the later line counts.
    rounds = {e.round: e for e in parsed("round", Round)}
    evaluations = {(e.round, e.part, e.view, e.site): e for e in parsed("evaluation", Evaluation)}
    finals = {(e.part, e.rule, e.view, e.scope, e.site): e for e in parsed("final", Result)}
    selections = {(e.view, e.metric): e for e in parsed("selection", Selection)}
    warnings = [str(event.get("text", "")) for _, event in by_kind.get("warning", [])]
    resumed = by_kind.get("resumed", [])
    restarted = resumed[-1][0] if resumed else 0
    ends = [event for number, event in by_kind.get("end", []) if number > restarted]
    return RunRecord(
        folder=path,
        config_text=config_text,
        start=start,
        rounds=[rounds[number] for number in sorted(rounds)],
        evaluations=sorted(evaluations.values(), key=lambda e: e.round),
        selections=list(selections.values()),
        finals=list(finals.values()),
        warnings=list(dict.fromkeys([*start.warnings, *warnings, *notes])),
        resumed=[int(event["round"]) for _, event in resumed if "round" in event],
        seconds=float(ends[-1].get("seconds", 0.0)) if ends else None,
    )


def _read_lines(source: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """The events with their line numbers, and a note per line that an interruption cut off.

    Only the last line, or the one before a `resumed` event, can be cut off: elsewhere the file is damaged.
    """
    events: list[tuple[int, dict[str, Any]]] = []
    notes: list[str] = []
    broken = 0
    for number, line in enumerate(source.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if broken and not (isinstance(event, dict) and event.get("event") == "resumed"):
            raise UserError(f"{source}, line {broken}: not JSON. The file is damaged; restore it from a copy.")
        broken = 0
        if isinstance(event, dict):
            events.append((number, event))
        else:
            broken = number
            notes.append(f"Line {number} of events.jsonl was cut off by an interruption and is left out.")
    return events, notes


def _parse(source: Path, number: int, kind: str, model: type[E], event: dict[str, Any]) -> E:
    try:
        return model.model_validate(event)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{source}, line {number}: {kind} event, field '{where}': {first['msg']}.") from error


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}. Restore the file that the run wrote.") from error
