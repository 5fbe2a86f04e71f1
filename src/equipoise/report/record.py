"""A run folder as values and frames: its `config.toml`, and its `events.jsonl`, which is read line by line."""

from __future__ import annotations

import json
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import ValidationError

from equipoise.core.errors import UserError, as_text
from equipoise.report.log_lines import KINDS, Evaluation, Final, Line, Round, Score, Selection, Start
from equipoise.report.validation_scores import validation_scores

#: what the lines of a frame of scores tell besides the metrics
TOLD = ("part", "rule", "round", "rounds", "view", "scope", "site", "recall", "confusion", "spread", "offset")
PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class RunRecord:
    """Everything a report needs to know about one run.

    `evaluations` has a line per model scored at a site after a round, `finals` one per line of test results. Their
    columns are those of `TOLD` that apply, and a column per metric.
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
    """How long it took; None while the run has not come to its end."""

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

    @cached_property
    def images(self) -> pd.DataFrame:
        """Images at each site: columns by part (train, valid, test) and class."""
        sites, classes = self.start.sites, self.start.classes
        counts = {part: [getattr(site, part) or [0] * len(classes) for site in sites] for part in PARTS}
        names = [site.name for site in sites]
        return pd.concat({part: pd.DataFrame(own, names, classes, int) for part, own in counts.items()}, axis=1)

    @cached_property
    def training_images(self) -> pd.DataFrame:
        """Training images of each class at the sites that train."""
        train = self.images["train"]
        return train[train.sum(axis=1) > 0]

    @property
    def evaluators(self) -> list[str]:
        """The places where models are only measured."""
        return [name for name in self.images.index if name not in self.training_images.index]

    @cached_property
    def end_view(self) -> str:
        """The view a site is left with when a round ends: personal where the method has it, else global."""
        return "personal" if (self.finals["view"] == "personal").any() else self.round_view

    @cached_property
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
        """A line per round and site: loss, seconds, examples, and bytes that the site sent and received."""
        kinds: dict[str, Any] = {"loss": float, "seconds": float, "examples": int, "sent": int, "received": int}
        visits = [(done.round, site) for done in self.rounds for site in done.sites]
        works = [work for done in self.rounds for work in done.sites.values()]
        told = {name: np.array([getattr(work, name) for work in works], dtype=kind) for name, kind in kinds.items()}
        rounds, sites = zip(*visits) if visits else ((), ())
        return pd.DataFrame({"round": rounds, "site": sites, **told})

    @cached_property
    def curves_made(self) -> dict[tuple[str, str, str], pd.DataFrame]:
        """The curves that figures have asked for, by metric, view and part: several figures show the same ones."""
        return {}

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


def setting(config: Mapping[str, Any], *path: str) -> Any:
    """The value under a path of keys, None when absent."""
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def scores_frame(lines: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A frame of scores from flat lines: numbers that are not known are NaN, a mean over sites has the site ""."""
    found = list(lines)
    columns = list(dict.fromkeys([*TOLD, *(key for line in found for key in line)]))
    kinds: dict[str, Any] = dict.fromkeys(["spread", *columns[len(TOLD) :]], float)
    kinds |= dict.fromkeys(["round", "rounds", "offset"], "Int64") | dict.fromkeys(["recall", "confusion"], object)
    return pd.DataFrame(found, columns=columns).fillna({"site": ""}).astype(kinds)


def _as_written(source: Path, size: int, checksum: object) -> bool:
    """Whether the first bytes of a log are those that its run wrote; older versions wrote no checksum."""
    if checksum is None:
        return True
    with source.open("rb") as file:
        return f"{zlib.crc32(file.read(size)):08x}" == checksum


def read_run(path: Path) -> RunRecord:
    """Read a run folder; a run that is not finished, or was cut off in a line, is read as far as it goes."""
    path = Path(path)
    source = path / "events.jsonl"
    if not source.is_file():
        raise UserError(f"{path} is not a run folder: it has no events.jsonl. Name a folder made by `equipoise run`.")
    found: dict[str, dict[Any, Any]] = {kind: {} for kind in KINDS}
    told: dict[str, list[Any]] = {"warning": [], "resumed": [], "end": [], "cut": []}
    ended = 0
    for number, offset, event in _events(source, told["cut"]):
        kind = str(event.get("event"))
        if kind in KINDS:
            line = _parsed(source, number, kind, event)
            # A resumed run writes again what it had written after its last checkpoint: the later line counts.
            found[kind][_identity(line, offset)] = (offset, line)
        elif kind in told:
            told[kind].append(event)
            ended = offset if kind == "end" else ended
            told["end"] = [] if kind == "resumed" else told["end"]
    if not found["start"]:
        raise UserError(f"{source} has no start event: the run has not begun. Run it, or wait for its first lines.")
    file = path / "config.toml"
    config_text = as_text(file.read_bytes(), str(file)) if file.is_file() else ""
    start = _with_config(next(iter(found["start"].values()))[1], file, config_text)
    scored = sorted(found["evaluation"].values(), key=lambda pair: pair[1].round)
    warnings = [str(event.get("text", "")) for event in told["warning"]]
    if told["end"] and not _as_written(source, ended, told["end"][-1].get("checksum")):
        warnings.append(
            f"{source.name} does not hold what the run wrote, so numbers here may be wrong: take it from a copy"
        )
    return RunRecord(
        folder=path,
        config_text=config_text,
        start=start,
        rounds=[line for _, (_, line) in sorted(found["round"].items())],
        evaluations=scores_frame(_flat(line) | {"offset": offset} for offset, line in scored),
        finals=scores_frame(_flat(line) for _, line in found["final"].values()),
        selections=[line for _, line in found["selection"].values()],
        warnings=list(dict.fromkeys([*start.warnings, *warnings, *told["cut"]])),
        resumed=[int(event["round"]) for event in told["resumed"] if "round" in event],
        seconds=float(told["end"][-1].get("seconds", 0.0)) if told["end"] else None,
    )


def _events(source: Path, cut: list[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The events with their line numbers and places in the file; an interruption's damage is stated in `cut`.

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
            whole = isinstance(event, dict)
            if broken and not (whole and event.get("event") == "resumed"):
                raise UserError(f"{source}, line {broken}: not JSON. The file is damaged; restore it from a copy.")
            broken = 0 if whole else number
            if whole:
                yield number, place, event
            else:
                cut.append(f"Line {number} of events.jsonl was cut off by an interruption and is left out.")


def _parsed(source: Path, number: int, kind: str, event: dict[str, Any]) -> Line:
    try:
        return KINDS[kind].model_validate(event)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{source}, line {number}: {kind} event, field '{where}': {first['msg']}.") from error


def _identity(line: Line, offset: int) -> Any:
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
    return offset


def _flat(line: Score) -> dict[str, Any]:
    """A line of a frame of scores."""
    told = {key: value for key, value in line if key in TOLD}
    extra = {"spread": line.extra.get("spread")} if isinstance(line, Final) else {"scope": "site"}
    return {**told, **extra, **line.metrics}


def _with_config(start: Start, file: Path, text: str) -> Start:
    """The start event, with the config of `config.toml` where it has none."""
    try:
        return start if start.config else start.model_copy(update={"config": tomllib.loads(text)})
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}. Restore the file that the run wrote.") from error
