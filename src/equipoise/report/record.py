"""A run folder as values and frames: its `config.toml`, and its `events.jsonl`, which is read line by line."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from pydantic import ValidationError

from equipoise.core.errors import UserError, as_text
from equipoise.report.log_lines import Evaluation, Final, Line, Round, Score, Selection, SiteCounts, SiteRound, Start
from equipoise.report.validation import validation_scores

L = TypeVar("L", bound=Line)

#: what the lines of a frame of scores tell besides the metrics
TOLD = ("part", "rule", "round", "rounds", "view", "scope", "site", "recall", "confusion", "spread", "offset")
KINDS: dict[str, type[Line]] = {
    "start": Start,
    "round": Round,
    "evaluation": Evaluation,
    "selection": Selection,
    "final": Final,
}


@dataclass(frozen=True)
class RunRecord:
    """Everything a report needs to know about one run.

    `evaluations` has a line per model scored at a site after a round, `finals` per line of test results. Columns are
    those of `TOLD` that apply, and a column per metric.
    """

    folder: Path
    config_text: str
    start: Start
    rounds: Sequence[Round]
    evaluations: pd.DataFrame
    finals: pd.DataFrame
    selections: Sequence[Selection]
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
    def status(self) -> str:
        """Whether the run is finished, where it stands if not, and where it was resumed."""
        if self.finished:
            text = f"finished after {self.last_round} round{'' if self.last_round == 1 else 's'}"
        else:
            planned = setting(self.start.config, "train", "rounds")
            of = f" of {planned}" if isinstance(planned, int) else ""
            text = f"not finished: stopped, or still running, after round {self.last_round}{of}"
        return text + (f"; resumed at round {', '.join(map(str, self.resumed))}" if self.resumed else "")

    @property
    def training_sites(self) -> list[SiteCounts]:
        """The sites that train, in the order of the run."""
        return [site for site in self.start.sites if sum(site.train)]

    @property
    def evaluators(self) -> list[str]:
        """The places where models are only measured."""
        return [site.name for site in self.start.sites if not sum(site.train)]

    @property
    def has_test_data(self) -> bool:
        """True when a site, a common set or a cohort has an image to test on."""
        return any(sum(site.test) for site in self.start.sites)

    @property
    def end_view(self) -> str:
        """The view a site is left with when a round ends: personal where the method has it, else global."""
        return "personal" if (self.finals["view"] == "personal").any() else self.round_view

    @property
    def round_view(self) -> str:
        """The view whose scores tell how rounds went: personal where rounds measured it, else global.

        Personal models that sites make by fine-tuning may be measured only at the end.
        """
        return "personal" if (self.evaluations["view"] == "personal").any() else "global"

    @property
    def selection(self) -> Selection | None:
        """Which round was chosen; None before the end."""
        return self.selections[-1] if self.selections else None

    @property
    def selected_round(self) -> int | None:
        """The round that is reported; None where each site has its own, or none is chosen yet."""
        return None if self.selection is None or self.selection.sites else self.selection.round

    @cached_property
    def work(self) -> pd.DataFrame:
        """A line per round and site: loss, seconds, and bytes that the site sent and received."""
        lines = [
            {"round": done.round, "site": site, **dict(work)}
            for done in self.rounds
            for site, work in done.sites.items()
        ]
        columns = ["round", "site", *SiteRound.model_fields]
        return pd.DataFrame(lines, columns=columns).astype({"loss": float})

    @cached_property
    def validation(self) -> pd.DataFrame:
        """Validation scores as results, of what is reported, and of the latest round while nothing is chosen."""
        settings = setting(self.start.config, "evaluation") or {}
        scored = self.evaluations[self.evaluations["part"] == "valid"]
        return scores_frame(validation_scores(scored, self.line, self.selection, settings))

    @cached_property
    def results(self) -> pd.DataFrame:
        """The test results, or, where there are none, validation scores of the models that sites are left with."""
        if len(self.finals):
            return self.finals
        return self.validation[(self.validation["view"] != "trained") & (self.validation["scope"] != "pooled")]

    def line(self, offset: int) -> dict[str, Any]:
        """The event that begins at this byte of the log."""
        with (self.folder / "events.jsonl").open("rb") as file:
            file.seek(offset)
            return json.loads(file.readline())


def scores_frame(lines: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A frame of scores from flat lines: numbers that are not known are NaN, a mean over sites has the site ""."""
    found = list(lines)
    columns = dict.fromkeys([*TOLD, *(key for line in found for key in line)])
    frame = pd.DataFrame(found, columns=[*columns]).fillna({"site": ""})
    metrics = [column for column in frame if column not in TOLD]
    kinds = dict.fromkeys([*metrics, "spread"], float) | dict.fromkeys(["round", "rounds", "offset"], "Int64")
    return frame.astype(kinds | dict.fromkeys(["recall", "confusion"], object))


def setting(config: Mapping[str, Any], *path: str) -> Any:
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
    # A resumed run writes again what it had written after its last checkpoint: the later line counts.
    found: dict[str, dict[Any, Any]] = {kind: {} for kind in KINDS}
    warnings: list[str] = []
    resumed: list[int] = []
    seconds = None
    notes: list[str] = []
    for number, offset, event in _events(source, notes):
        kind = str(event.get("event"))
        if kind in KINDS:
            line = _parsed(source, number, kind, event)
            found[kind][_identity(line, number)] = (offset, line)
        elif kind == "warning":
            warnings.append(str(event.get("text", "")))
        elif kind == "resumed":
            resumed += [int(event["round"])] if "round" in event else []
            seconds = None
        elif kind == "end":
            seconds = float(event.get("seconds", 0.0))
    if not found["start"]:
        raise UserError(f"{source} has no start event: the run has not begun. Run it, or wait for its first lines.")
    start, config_text = _settings(path, next(iter(found["start"].values()))[1])
    scored = sorted(found["evaluation"].values(), key=lambda pair: pair[1].round)
    return RunRecord(
        folder=path,
        config_text=config_text,
        start=start,
        rounds=[line for _, (_, line) in sorted(found["round"].items())],
        evaluations=scores_frame(_flat(line) | {"offset": offset} for offset, line in scored),
        finals=scores_frame(_flat(line) for _, line in found["final"].values()),
        selections=[line for _, line in found["selection"].values()],
        warnings=list(dict.fromkeys([*start.warnings, *warnings, *notes])),
        resumed=resumed,
        seconds=seconds,
    )


def _settings(path: Path, start: Start) -> tuple[Start, str]:
    """The start event, with the config of `config.toml` where it has none, and the text of this file."""
    file = path / "config.toml"
    text = as_text(file.read_bytes(), str(file)) if file.is_file() else ""
    if start.config or not text:
        return start, text
    try:
        return start.model_copy(update={"config": tomllib.loads(text)}), text
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}. Restore the file that the run wrote.") from error


def _events(source: Path, notes: list[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The events with their line numbers and places in the file; lines cut off by an interruption go to `notes`.

    Only the last line, or the one before a `resumed` event, can be cut off: elsewhere the file is damaged.
    """
    broken, offset = 0, 0
    with source.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place, offset = offset, offset + len(line)
            if not line.strip():
                continue
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if broken and not (isinstance(event, dict) and event.get("event") == "resumed"):
                raise UserError(f"{source}, line {broken}: not JSON. The file is damaged; restore it from a copy.")
            broken = 0 if isinstance(event, dict) else number
            if broken:
                notes.append(f"Line {number} of events.jsonl was cut off by an interruption and is left out.")
            else:
                yield number, place, event


def _identity(line: Line, number: int) -> Any:
    """What tells a line from others of its kind."""
    match line:
        case Round():
            return line.round
        case Evaluation():
            return line.round, line.part, line.view, line.site
        case Final():
            return line.part, line.rule, line.view, line.scope, line.site
        case Selection():
            return line.view, line.metric
    return number


def _flat(line: Score) -> dict[str, Any]:
    """A line of a frame of scores."""
    told = {key: value for key, value in line if key in TOLD}
    extra = {"spread": line.extra.get("spread")} if isinstance(line, Final) else {"scope": "site"}
    return {**told, **extra, **line.metrics}


def _parsed(source: Path, number: int, kind: str, event: dict[str, Any]) -> Line:
    try:
        return KINDS[kind].model_validate(event)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{source}, line {number}: {kind} event, field '{where}': {first['msg']}.") from error
