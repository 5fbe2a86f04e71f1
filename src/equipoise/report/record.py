"""A run folder as values and frames: its `config.toml`, and its `events.jsonl`, which is read once, into columns."""

from __future__ import annotations

import json
import tomllib
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec import DecodeError, Struct
from msgspec.json import Decoder
from pydantic import ValidationError

from equipoise.core.errors import UserError, as_text
from equipoise.engine.events import read_event
from equipoise.report.log_lines import KINDS, Evaluation, Final, Line, Round, Selection, Start, View
from equipoise.report.validation_scores import validation_scores

#: what the lines of a frame of scores tell besides the metrics
TOLD = ("part", "rule", "round", "rounds", "view", "scope", "site", "recall", "confusion", "spread", "offset")
KEY = ("round", "place", "offset")
#: the numbers of a site's work in a round, and what stands for one that is not told
WORK: dict[str, float] = {"loss": nan, "seconds": 0.0, "examples": 0, "sent": 0, "received": 0}


@dataclass(frozen=True)
class RunRecord:
    """Everything a report needs to know about one run.

    `evaluations` has a line per model scored at a site after a round, `finals` one per line of test results. Their
    columns are those of `TOLD` that apply, and a column per metric. `rounds` has the seconds and learning rate of each
    round, `work` the numbers of each site's work in it, `missing` why a site was left out of it, and `entries` how many
    bytes a site sent of what.
    """

    folder: Path
    config_text: str
    start: Start
    rounds: pd.DataFrame
    work: pd.DataFrame
    missing: Sequence[tuple[int, str, str]]
    entries: pd.DataFrame
    evaluations: pd.DataFrame
    finals: pd.DataFrame
    selections: Sequence[Selection]
    actions: Mapping[int, int]
    """Where the log tells, by round, how the method acted."""
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
        return int(self.rounds.index[-1]) if len(self.rounds) else 0

    @property
    def part(self) -> str:
        """The images that results are of: test images, or where there are no test results, validation images."""
        return "test" if len(self.finals) else "valid"

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
    def images(self) -> pd.DataFrame:
        """Images at each site: columns by part (train, valid, test) and class."""
        return self.start.images

    @property
    def training_images(self) -> pd.DataFrame:
        """Training images of each class at the sites that train."""
        return self.start.training_images

    @property
    def evaluators(self) -> list[str]:
        """The places where models are only measured."""
        return self.start.evaluators

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
    def made(self) -> dict[Any, pd.DataFrame]:
        """Frames that tables and figures have asked for: several show the same ones."""
        return {}

    @cached_property
    def validation(self) -> pd.DataFrame:
        """Validation scores as results, of what is reported, and of the latest round while nothing is chosen."""
        settings = setting(self.start.config, "evaluation") or {}
        scored = self.evaluations[self.evaluations["part"] == "valid"]
        return scores_frame(validation_scores(scored, self.lines, self.selection, settings))

    @cached_property
    def results(self) -> pd.DataFrame:
        """The test results, or, where there are none, validation scores of the models that sites are left with."""
        if len(self.finals):
            return self.finals
        return self.validation[(self.validation["view"] != "trained") & (self.validation["scope"] != "pooled")]

    def lines(self, offsets: Iterable[int]) -> Iterator[dict[str, Any]]:
        """The events that begin at these bytes of the log."""
        with (self.folder / "events.jsonl").open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                yield json.loads(file.readline())


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


class ScoreLine(Struct, gc=False):
    """What frames take of an evaluation's line: the parser skips the rest, and makes nothing of it."""

    round: int
    part: str
    view: View
    site: str
    metrics: dict[str, float | None]


SCORE, score_in = b'{"event": "evaluation", ', Decoder(ScoreLine).decode


class Columns:
    """Numbers by name of a round and place, line after line, in arrays: a line costs one call and no object."""

    def __init__(self) -> None:
        self.layouts: dict[tuple[str, ...], tuple[array, array]] = {}
        """Keys and values of the lines that have the same names."""

    def add(self, told: Mapping[str, float | None], key: tuple[int, int, int]) -> None:
        """Append a line of a round, place and offset in the log; what is not known is NaN."""
        names = tuple(told)
        try:
            keys, values = self.layouts[names]
        except KeyError:
            keys, values = self.layouts[names] = array("q"), array("d")
        size = len(values)
        try:
            values.extend(told.values())  # type: ignore[arg-type]
        except TypeError:
            del values[size:]
            values.extend([float(nan if value is None else value) for value in told.values()])
        keys.extend(key)

    def frame(self, repeats: bool) -> pd.DataFrame:
        """The lines by round, in their order; where some may be `repeats`, the last one of a round and place."""
        every = [pd.DataFrame(columns=[*KEY], dtype="int64")] if not self.layouts else []
        for names, (keys, values) in self.layouts.items():
            numbers = np.frombuffer(values).reshape(-1, len(names)) if names else np.empty((len(keys) // 3, 0))
            told = pd.DataFrame(np.frombuffer(keys, "int64").reshape(-1, 3), columns=[*KEY])
            every.append(pd.concat([told, pd.DataFrame(numbers, columns=[*names])], axis=1))
        frame = every[0] if len(every) == 1 else pd.concat(every).sort_values("offset", kind="stable")
        if repeats:
            frame = frame[~frame.duplicated(["round", "place"], keep="last")]
        ordered = frame["round"].is_monotonic_increasing
        return frame if ordered and len(every) == 1 else frame.sort_values("round", kind="stable", ignore_index=True)


@dataclass
class _Reading:
    """What has been read of a log."""

    kept: dict[str, dict[Any, Line]] = field(default_factory=lambda: {"start": {}, "selection": {}, "final": {}})
    rounds: dict[int, tuple[float, float | None, Mapping[str, float], Mapping[str, str]]] = field(default_factory=dict)
    works: Columns = field(default_factory=Columns)
    sites: dict[str, int] = field(default_factory=dict)
    scores: Columns = field(default_factory=Columns)
    places: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """Part, view and site of scores."""
    actions: dict[int, int] = field(default_factory=dict)
    warnings: dict[str, None] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    repeats: bool = False
    """Whether a line may stand for one that came before it."""
    seconds: float | None = None

    def score(self, line: ScoreLine, offset: int) -> None:
        """Take in a score."""
        place = self.places.get((line.part, line.view, line.site))
        if place is None:
            place = self.places.setdefault((line.part, line.view, line.site), len(self.places))
        self.scores.add(line.metrics, (line.round, place, offset))

    def take(self, event: Mapping[str, Any], offset: int) -> None:
        """Take in one event. A resumed run writes again what followed its last checkpoint: the later line counts."""
        match event.get("event"):
            case "evaluation":
                own = Evaluation.model_validate(event)
                self.score(ScoreLine(own.round, own.part, own.view, own.site, own.metrics), offset)
            case "round":
                self._round(event)
            case "start" | "selection" | "final" as kind:
                line = KINDS[kind].model_validate(event)
                self.kept[kind][_identity(line)] = line
            case "actions":
                self.actions[event["round"]] = offset
            case "warning":
                self.warnings[str(event.get("text", ""))] = None
            case "resumed":
                self.seconds, self.repeats = None, True
                self.resumed += [int(event["round"])] if "round" in event else []
            case "end":
                self.seconds = float(event.get("seconds", 0.0))

    def _round(self, event: Mapping[str, Any]) -> None:
        number, every = int(event["round"]), event.get("sites", {})
        if type(event["round"]) is not int or not self.sites.keys() >= every.keys():
            Round.model_validate(event)
            for site in every:
                self.sites.setdefault(site, len(self.sites))
        for site, told in every.items():
            self.works.add(told, (number, self.sites[site], 0))
        entries, missing = event.get("entries", {}), event.get("missing", {})
        self.rounds[number] = float(event["seconds"]), event.get("lr"), entries, missing

    def work(self) -> pd.DataFrame:
        """A line per round and site."""
        told = self.works.frame(self.repeats)
        own = told.reindex(columns=["round", *WORK]).fillna(WORK)
        own.insert(1, "site", _named(told["place"], [*self.sites]))
        return own.astype(dict.fromkeys(["examples", "sent", "received"], "int64"))

    def evaluations(self) -> pd.DataFrame:
        """A line per score of a site after a round."""
        told = self.scores.frame(self.repeats)
        places = told.pop("place")
        for at, name in enumerate(("part", "view", "site"), start=1):
            own = [place[at - 1] for place in self.places]
            codes = {each: code for code, each in enumerate(dict.fromkeys(own))}
            told.insert(at, name, _named(np.array([codes[each] for each in own], "int64")[places], [*codes]))
        told.insert(4, "scope", _named(np.zeros(len(told), "int64"), ["site"]))
        return told


def _named(codes: np.ndarray, names: Sequence[str]) -> pd.Categorical:
    return pd.Categorical.from_codes(codes, pd.Index(names, dtype=object))


def read_run(path: Path) -> RunRecord:
    """Read a run folder; a run that is not finished, or was cut off in a line, is read as far as it goes."""
    path = Path(path)
    source, file = path / "events.jsonl", path / "config.toml"
    if not source.is_file():
        raise UserError(f"{path} is not a run folder: it has no events.jsonl. Name a folder made by `equipoise run`.")
    read, cut = _Reading(), list[str]()
    for number, offset, event in _events(source, cut, read.score):
        try:
            read.take(event, offset)
        except (ValidationError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as problem:
            read.repeats = True
            read.take(_explained(source, number, event, problem), offset)
    if not read.kept["start"]:
        raise UserError(f"{source} has no start event: the run has not begun. Run it, or wait for its first lines.")
    config_text = as_text(file.read_bytes(), str(file)) if file.is_file() else ""
    start: Any = _with_config(read.kept["start"][None], file, config_text)  # type: ignore[arg-type]
    rounds = dict(sorted(read.rounds.items()))
    told = pd.DataFrame([own[:2] for own in rounds.values()], [*rounds], ["seconds", "lr"], dtype=float)
    return RunRecord(
        folder=path,
        config_text=config_text,
        start=start,
        rounds=told.rename_axis("round"),
        work=read.work(),
        missing=[(number, site, why) for number, own in rounds.items() for site, why in own[3].items()],
        entries=pd.DataFrame([own[2] for own in rounds.values() if own[2]], dtype=float).fillna(0.0),
        evaluations=read.evaluations(),
        finals=scores_frame(_flat(line) for line in read.kept["final"].values()),  # type: ignore[arg-type]
        selections=[*read.kept["selection"].values()],  # type: ignore[list-item]
        actions=dict(sorted(read.actions.items())),
        warnings=list(dict.fromkeys([*start.warnings, *read.warnings, *cut])),
        resumed=read.resumed,
        seconds=read.seconds,
    )


def _events(
    source: Path, cut: list[str], score: Callable[[ScoreLine, int], None]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The events with their line numbers and places in the file, without sound scores, which go to `score`; an
    interruption's damage is stated in `cut`.

    Only the last line, or the one before a `resumed` event, can be cut off: elsewhere the file is damaged. The last
    event tells a checksum of all lines before it; older versions wrote none.
    """
    broken, offset, checksum = 0, 0, 0
    sound = True
    with source.open("rb", buffering=1 << 20) as file:
        for number, line in enumerate(file, start=1):
            place, before = offset, checksum
            offset, checksum = offset + len(line), zlib.crc32(line, checksum)
            if not broken and line.startswith(SCORE):
                try:
                    found = score_in(line)
                except DecodeError:  # what is wrong with it is found out below
                    pass
                else:
                    score(found, place)
                    continue
            event = read_event(line)
            if event is None and not line.strip():
                continue
            if broken and not (event is not None and event.get("event") == "resumed"):
                raise UserError(f"{source}, line {broken}: not JSON. The file is damaged; restore it from a copy.")
            broken = 0 if event is not None else number
            if event is None:
                cut.append(f"Line {number} of events.jsonl was cut off by an interruption and is left out.")
                continue
            if event.get("event") == "end":
                sound = event.get("checksum") in (None, f"{before:08x}")
            yield number, place, event
    if not sound:
        cut.insert(
            0, f"{source.name} does not hold what the run wrote, so numbers here may be wrong: take it from a copy"
        )


def _explained(source: Path, number: int, event: Any, problem: Exception) -> dict[str, Any]:
    """The event as its model reads it, where that is possible; else what is wrong with it."""
    kind = str(event.get("event"))
    try:
        if kind not in KINDS or isinstance(problem, ValidationError):
            raise problem
        return {"event": kind, **KINDS[kind].model_validate(event).model_dump()}
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{source}, line {number}: {kind} event, field '{where}': {first['msg']}.") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{source}, line {number}: {kind} event: {error}. Restore it from a copy.") from error


def _identity(line: Line) -> Any:
    """What tells a line from others of its kind."""
    match line:
        case Final():
            return line.part, line.rule, line.view, line.scope, line.site
        case Selection():
            return line.view, line.metric
    return None


def _flat(line: Final) -> dict[str, Any]:
    """A line of a frame of scores."""
    told = {key: value for key, value in line if key in TOLD}
    return {**told, "spread": line.extra.get("spread"), **line.metrics}


def _with_config(start: Start, file: Path, text: str) -> Start:
    """The start event, with the config of `config.toml` where it has none."""
    try:
        return start if start.config else start.model_copy(update={"config": tomllib.loads(text)})
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}. Restore the file that the run wrote.") from error
