"""What is run: all methods, and every switch, as the old commit's command line and studies tell of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bits.sides import Failed, Side

#: a run of half a second: 3 sites, 4 classes (some missing at sites), 16 pixels
TINY: dict[str, Any] = {
    "train.rounds": 3,
    "train.batch_size": 8,
    "data.phantom.images": 120,
    "data.phantom.sites": 3,
    "data.phantom.classes": 4,
    "data.phantom.size": 16,
    "augment.name": "flips",
    "compute.device": "cpu",
}
#: settings under which three rounds pass through everything that a method does
THOROUGH: dict[str, dict[str, Any]] = {
    "fedbm": {
        "fedbm.every": 1,
        "fedbm.generator_steps": 2,
        "fedbm.generator_batch": 8,
        "fedbm.generator_width": 4,
        "fedbm.synthetic": 4,
    },
    "prr": {"prr.warmup": 1, "train.epochs": 3},
    "creff": {"creff.feature_steps": 3, "creff.classifier_epochs": 3},
    "climb": {"climb.primal_rounds": 1},
}
#: systems whose numbers are turned, too
SYSTEMS = ("prr", "fediic", "fednpr", "fednpr-per", "fedbm")
#: tables of a study's rows that matter on a small phantom; the others name data, sizes and devices
TURNED = ("train.loss", "train.aggregation", "train.optimiser.", "train.schedule.", "npr.", "evaluation.")
#: numbers that suit rounds and images by the hundred
UNTURNED = ("evaluation.first_round", "evaluation.batch_size")
#: what every method is crossed with
CROSSED: tuple[dict[str, Any], ...] = (
    {"npr.weight": 0.1, "train.participation": 0.7},
    {"npr.weight": 0.1, "npr.supervised": False},
    {"train.loss": "focal", "train.aggregation": "uniform"},
    {"train.loss": "balanced_softmax", "train.optimiser.name": "adamw", "train.optimiser.keep": True},
)
#: how parts of the systems are reached that another switch has to make room for
ROOM: dict[str, dict[str, Any]] = {
    "prr": {"prr.cpa_global": False, "prr.cpa_local": False},
    "fediic": {"fediic.dala": False},
    "fedbm": {"fedbm.classifier": "learned"},
}
#: general tables, and a method for all their switches
GENERAL = {"train": "fedavg", "evaluation": "fedrep", "npr": "fednpr", "augment": "prr"}


@dataclass(frozen=True)
class Case:
    """One run: a method and what it sets beyond the small phantom."""

    method: str
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The method and its settings, for people."""
        return " ".join([self.method, *(f"{key}={_told(value)}" for key, value in self.more)])

    @property
    def slug(self) -> str:
        """A name for a folder; it also says what the run has in common with all others."""
        digest = hashlib.sha256(json.dumps([self.method, self.settings]).encode()).hexdigest()[:8]
        return f"{re.sub(r'[^A-Za-z0-9=.]+', '-', self.name)[:100]}-{digest}"

    @property
    def settings(self) -> list[str]:
        """Values of `--set`."""
        merged = TINY | THOROUGH.get(self.method, {}) | dict(self.more)
        return [f"{key}={json.dumps(value)}" for key, value in merged.items()]

    @property
    def arguments(self) -> list[str]:
        """The command line of the run, without its folder."""
        return ["run", "--method", self.method, *(part for text in self.settings for part in ("--set", text))]


def case(method: str, settings: Mapping[str, Any]) -> Case:
    """A case whose settings have one order."""
    return Case(method, tuple(sorted((key, _frozen(value)) for key, value in settings.items())))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def all_cases(side: Side) -> list[Case]:
    """Every case that the commit of a side knows of, each once."""
    methods = method_names(side)
    found = itertools.chain(
        (case(method, {}) for method in methods),
        *(study_cases(study, methods) for study in side.source.studies()),
        option_cases(side, methods),
        (case(method, more) for method in methods for more in CROSSED),
        (case(method, room | more) for method, room in ROOM.items() for more in CROSSED),
    )
    return list(dict.fromkeys(_few_numbers(found)))


def method_names(side: Side) -> list[str]:
    """The names in the first column of `equipoise methods`."""
    rows = side.said("methods").splitlines()
    rule = next((number for number, row in enumerate(rows) if row.strip().startswith("──")), len(rows))
    names = [row.split()[0] for row in itertools.takewhile(lambda row: "  " in row.strip(), rows[rule + 1 :])]
    if not names or not all(re.fullmatch(r"[a-z-]+", name) for name in names):
        raise Failed(f"{side.source.title}: no methods can be read from `equipoise methods`: {names}")
    return names


# ---- studies ---------------------------------------------------------------------------------------------------


def study_cases(study: Mapping[str, Any], methods: Iterable[str]) -> Iterator[Case]:
    """What each row of a study turns by itself, and once for each method what the study sets for all its rows."""
    tables = (*(f"{method}." for method in methods), *TURNED)
    rows = study.get("row", [])
    together = [study.get("settings", {}), *(entry.get("settings", {}) for entry in study.get("data", []))]
    for method, settings in [
        *((row["method"], row.get("settings", {})) for row in rows),
        *((row["method"], settings) for row in rows for settings in together),
    ]:
        mine = (f"{method}.", *TURNED)
        turned = _turned(settings, tables)
        yield case(method, {key: value for key, value in turned.items() if key.startswith(mine)})


def _turned(settings: Mapping[str, Any], tables: tuple[str, ...]) -> dict[str, Any]:
    flat = dict(dotted(settings))
    return {key: value for key, value in flat.items() if key.startswith(tables) and key not in UNTURNED}


def dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as pairs of a dotted key and a value."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# ---- options ---------------------------------------------------------------------------------------------------

ROW = re.compile(r"^\| `(?P<key>[^`]+)` \| (?P<kind>.*?) \| `?(?P<default>.*?)`? \| ")
WORD = re.compile(r"[A-Za-z][\w-]*")


def option_cases(side: Side, methods: Iterable[str]) -> Iterator[Case]:
    """Every other value of each switch of every method, and another value of each number of the systems."""
    for method in methods:
        for key, value in other_values(side, method, numbers=method in SYSTEMS):
            yield case(method, {key: value})
    for table, method in GENERAL.items():
        for key, value in other_values(side, table, numbers=table == "npr"):
            yield case(method, {key: value})


def other_values(side: Side, table: str, numbers: bool) -> Iterator[tuple[str, Any]]:
    """Values that the options of a table may have besides their defaults."""
    for row in listed(side, table):
        if row["key"] not in TINY:
            yield from ((row["key"], value) for value in _others(row["kind"], row["default"], numbers))


def listed(side: Side, *table: str) -> list[re.Match[str]]:
    """The rows of `equipoise settings`, or of one of its tables."""
    status, page = side.run("settings", *table, "--markdown").result()
    return [row for row in map(ROW.match, page.splitlines()) if row is not None] if not status else []


def changed_defaults(old: Side, new: Side) -> list[str]:
    """The settings whose defaults differ between two commits."""
    before, after = ({row["key"]: row["default"] for row in listed(side)} for side in (old, new))
    return [f"{key} {before[key]} -> {after[key]}" for key in before if before[key] != after.get(key, before[key])]


def _others(kind: str, default: str, numbers: bool) -> list[Any]:
    if kind == "true or false":
        return [default != "true"]
    if re.match(r"(whole )?number", kind):
        return _other_number(kind, default) if numbers else []
    words = re.split(r", | or ", kind)
    if len(words) > 1 and all(map(WORD.fullmatch, words)):
        return [word for word in words if word != default.strip('"')]
    return []


def _other_number(kind: str, default: str) -> list[Any]:
    if not re.fullmatch(r"[\d.e-]+", default):
        return []
    if kind.startswith("whole"):
        return [2] if default != "2" else [3]
    return [float(default) / 2 or 0.5]


def _few_numbers(cases: Iterable[Case]) -> Iterator[Case]:
    """Of cases that differ in numbers alone, those with the least and the greatest."""
    groups: dict[Any, dict[Case, None]] = {}
    for one in cases:
        shape = tuple((key, "number" if _is_number(value) else value) for key, value in one.more)
        groups.setdefault((one.method, shape), {})[one] = None
    for group in groups.values():
        ordered = sorted(group, key=lambda one: [value for _, value in one.more if _is_number(value)])
        yield from (ordered[0], ordered[-1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def quick(cases: Iterable[Case]) -> list[Case]:
    """A dozen cases that pass through most of the code."""
    wanted = ["fedavg", "local", "fedrep", "scaffold", "moon", "creff", *SYSTEMS]
    wanted += ["fedbn npr.weight=0.1 train.participation=0.7", "prr prr.global_view=true", "climb"]
    return [one for one in cases if one.name in wanted]
