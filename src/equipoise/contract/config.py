"""Everything a run depends on, typed and validated, read from TOML.

Method options live in a table named after the method (`[fedprox] mu = 0.01`), so that one file can hold the
options of several methods; the tables of methods that do not run are checked and otherwise ignored.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from equipoise.core.errors import UserError, as_text
from equipoise.core.table import Table
from equipoise.data.augment import AugmentConfig
from equipoise.data.config import DataConfig
from equipoise.metrics import METRICS
from equipoise.nets.config import NetConfig

T = TypeVar("T", bound=BaseModel)

LONGEST_VALUE = 80
"""Characters of a wrong value that a message still shows."""


Decay = Annotated[float, Field(ge=0, lt=1)]
"""What a moving average keeps of its past at each step."""


if TYPE_CHECKING:
    ChoosingMetric = str
else:
    ChoosingMetric = Literal[tuple(metric.name for metric in METRICS if metric.chooses)]


class OptimiserConfig(Table):
    """The optimiser of a site's local training."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="the kind of step")
    lr: PositiveFloat = Field(0.02, description="learning rate of the first round")
    momentum: Decay = Field(0.9, description="SGD only")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Adam and AdamW only")
    weight_decay: float = Field(0.0, ge=0, description="L2, added to the gradient; AdamW: by itself, times the rate")
    keep: bool = Field(False, description="keep the moments from round to round instead of starting anew")
    clip: PositiveFloat | None = Field(None, description="largest norm of a step's gradient")

    def unused(self) -> dict[str, str]:
        return {"betas": "SGD has none"} if self.name == "sgd" else {"momentum": f"{self.name} has betas instead"}


class ScheduleConfig(Table):
    """The learning rate's factor in round r (counted from 0)."""

    name: Literal["constant", "step", "multistep", "exponential"] = Field(
        "constant", description="exponential: multiply by gamma after each round"
    )
    every: PositiveInt = Field(10, description="step: multiply by gamma every so many rounds")
    milestones: tuple[NonNegativeInt, ...] = Field((), description="multistep: multiply by gamma after so many rounds")
    gamma: float = Field(0.5, gt=0, le=1, description="factor of one decay")

    def unused(self) -> dict[str, str]:
        unused = {
            "constant": ("every", "milestones", "gamma"),
            "step": ("milestones",),
            "multistep": ("every",),
            "exponential": ("every", "milestones"),
        }[self.name]
        return dict.fromkeys(unused, f"the schedule is {self.name}")

    def factor(self, round_index: int) -> float:
        """gamma to the power of the number of decays before this round."""
        decays = {
            "constant": 0,
            "step": round_index // self.every,
            "multistep": sum(round_index >= milestone for milestone in self.milestones),
            "exponential": round_index,
        }[self.name]
        return self.gamma**decays


class TrainConfig(Table):
    """Rounds and the local training within them."""

    rounds: PositiveInt = Field(20, description="rounds of communication")
    epochs: PositiveInt = Field(1, description="passes over a site's training images in a round")
    steps: PositiveInt | None = Field(None, description="local steps a round, instead of epochs")
    batch_size: int = Field(32, ge=2, description="images of a local step")
    loss: Literal["ce", "balanced_softmax", "focal", "fedeamc", "fedlc"] = Field("ce", description="supervised loss")
    optimiser: OptimiserConfig = OptimiserConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    participation: float = Field(1.0, gt=0, le=1, description="share of the sites drawn in each round")
    min_sites: PositiveInt = Field(1, description="a round with fewer answers is repeated")
    aggregation: Literal["size", "uniform"] = Field("size", description="weights of the sites in averages")

    def unused(self) -> dict[str, str]:
        return {"epochs": "train.steps is set"} if self.steps else {}


class EvaluationConfig(Table):
    """When models are measured and how the reported one is chosen. Only validation data decides."""

    every: PositiveInt = Field(1, description="rounds between two evaluations")
    batch_size: PositiveInt = Field(256, description="images at a time")
    rule: Literal["best", "last", "mean_last"] = Field(
        "best", description="the round that is reported: the best on validation data, the last, or the last ones' mean"
    )
    metric: ChoosingMetric = Field(METRICS[0].name, description="the validation score that decides")
    view: Literal["auto", "global", "personal"] = Field(
        "auto",
        description="whose validation score decides: personal models where the method has them. Where the global one "
        "does, personal models that sites make by fine-tuning are measured at the end alone",
    )
    select: Literal["federation", "site"] = Field(
        "federation", description="one round for all, or each site's best of its personal model on its own validation"
    )
    first_round: PositiveInt = Field(1, description="rounds before this one are never selected")
    last: PositiveInt = Field(5, description="mean_last: how many rounds")
    trained: bool = Field(True, description="also measure right after local training (retrogress)")
    trained_test: bool = Field(False, description="report test scores right after local training too (FedNPR's)")
    test: Literal["selected", "always"] = Field("selected", description="when the test part is measured")

    def unused(self) -> dict[str, str]:
        unused = {"best": ("last",), "last": ("first_round", "last"), "mean_last": ()}[self.rule]
        return dict.fromkeys(unused, f"evaluation.rule is {self.rule}")

    def may_report(self, number: int, rounds: int) -> bool:
        """Whether test scores of a round may be part of a run's results, as far as can be known before its end."""
        first = {"best": 1, "last": rounds, "mean_last": rounds - self.last + 1}[self.rule]
        measured = number % self.every == 0 or number == rounds
        return measured and number >= max(self.first_round, first)

    def reportable(self, rounds: int) -> list[int]:
        """All such rounds."""
        return [number for number in range(1, rounds + 1) if self.may_report(number, rounds)]

    @model_validator(mode="after")
    def _sites_judge(self) -> EvaluationConfig:
        if self.select == "site" and self.rule != "best":
            raise ValueError("select = 'site' takes each site's best round: it needs rule = 'best'")
        return self


class CheckpointConfig(Table):
    """Which rounds stay on disk."""

    keep: PositiveInt = Field(2, description="the last so many rounds, besides those that they selected")
    every: PositiveInt = Field(1, description="rounds between checkpoints")


class ComputeConfig(Table):
    """Where and how the arithmetic runs. `threads`, `device`, `precision` and `channels_last` change bits."""

    device: str = Field("auto", description="cpu, cuda or cuda:1; auto: the GPU where there is one")
    workers: PositiveInt = Field(1, description="processes on a CPU; change no bit")
    threads: int = Field(1, ge=1, le=1024, description="threads of a process")
    precision: Literal["fp32", "tf32", "bf16"] = Field("fp32", description="of nets on a GPU; bf16: by autocast")
    channels_last: bool = Field(False, description="how images lie in memory; kernels of our own need it")
    deterministic: bool = Field(True, description="deterministic GPU kernels")
    slots: int = Field(0, ge=0, description="models in training at a time on a GPU; 0: as many as fit")
    capture: bool = Field(True, description="replay captured steps on a GPU")


class NprConfig(Table):
    """Sub-cluster prototypes as a regulariser of any method (FedNPR)."""

    weight: float = Field(0.0, ge=0, description="lambda of Eq. 5; 0: none; 1: what the released code computes")
    clusters: PositiveInt = Field(4, description="K, sub-clusters of each class")
    cluster: Literal["sinkhorn", "random", "released"] = Field("sinkhorn", description="how features are sorted")
    normalise: Literal["layernorm", "none", "temperature"] = Field("layernorm", description="of the cosines")
    temperature: PositiveFloat = Field(0.1, description="divides cosines where normalise is temperature")
    view: Literal["plain", "augmented"] = Field("plain", description="the images that sub-clusters are found on")
    supervised: bool = Field(True, description="false: NPR alone trains, the nearest prototype predicts")

    def unused(self) -> dict[str, str]:
        if not self.weight:
            keys = ("clusters", "cluster", "normalise", "temperature", "view")
            return dict.fromkeys(keys, "npr.weight is 0")
        return {} if self.normalise == "temperature" else {"temperature": f"npr.normalise is {self.normalise}"}

    @model_validator(mode="after")
    def _something_trains(self) -> NprConfig:
        if not self.supervised and self.weight == 0:
            raise ValueError("npr.supervised = false leaves nothing to train by: set npr.weight above 0")
        return self


#: what does not change a run's results
_INDIFFERENT: Any = {
    "name": True,
    "compute": {"workers", "slots", "capture"},
    "checkpoint": True,
    "data": {"root", "store"},
}


class Config(Table):
    """A whole run."""

    name: str = Field("", description="the run's name; empty: made of method, data and seed")
    method: str = Field("fedavg", description="see `equipoise methods`")
    seed: int = Field(1, ge=0, lt=2**32, description="of everything that is drawn")
    data: DataConfig = DataConfig()
    net: NetConfig = NetConfig()
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    compute: ComputeConfig = ComputeConfig()
    npr: NprConfig = NprConfig()
    methods: dict[str, dict[str, Any]] = Field({}, description="option tables of methods, by table name")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.name in (".", "..") or any(mark in self.name for mark in "/\\\0"):
            raise ValueError(f"name = {self.name!r} is no folder name; the run's place is --out")
        if self.evaluation.first_round > self.train.rounds:
            raise ValueError(
                f"evaluation.first_round = {self.evaluation.first_round} lies after the last round "
                f"(train.rounds = {self.train.rounds}): no round could be selected; set it to 1, say"
            )
        return self

    @property
    def run_name(self) -> str:
        """The name of the run's folder."""
        data = self.data.name.replace(":", "-").replace("/", "-").strip("-.")
        return self.name or f"{self.method}-{data}-seed{self.seed}"

    def may_report(self, number: int) -> bool:
        """Whether test scores of this round may be part of the results, as far as can be known before the end."""
        return self.evaluation.may_report(number, self.train.rounds)

    def digest(self) -> str:
        """Identifies what decides a run's results; two runs with one digest, on one kind of device, give the same
        bits."""
        decisive = self.model_dump(mode="json", exclude=_INDIFFERENT)
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """The resolved config as TOML, readable by `load_config`."""
        raw = self.model_dump(mode="json", exclude_none=True)
        return tomli_w.dumps({**{k: v for k, v in raw.items() if k != "methods"}, **raw["methods"]})


def parse_config(raw: Mapping[str, Any], tables: Mapping[str, type[Table]], where: str = "config") -> Config:
    """Validate a raw config; `tables` maps the name of each method's option table to its model."""
    general = {key: value for key, value in raw.items() if key not in tables}
    methods = {}
    for key in raw.keys() & tables.keys():
        methods[key] = validated(tables[key], raw[key], f"{where}: [{key}]").model_dump(mode="json", exclude_unset=True)
    if "methods" in general:
        raise UserError(f"{where}: unknown key 'methods'; write a table named after the method, like [fedprox]")
    return validated(Config, {**general, "methods": dict(sorted(methods.items()))}, where)


def validated(model: type[T], raw: Any, where: str) -> T:
    """`raw` as a table of this model; a mistake is told by its place and value."""
    try:
        return model.model_validate(raw)
    except ValidationError as problem:
        lines = [f"  {': '.join([*_place(e), _explain(e, model)])}" for e in problem.errors()]
        raise UserError(f"{where} is not valid:\n" + "\n".join(lines)) from None


def _place(error: Any) -> list[str]:
    """Where a mistake is, entries of lists counted from 1; nothing for the whole."""
    keys = [f"{key + 1}" if isinstance(key, int) else str(key) for key in error["loc"]]
    return [".".join(keys)] if keys else []


def _explain(error: Any, model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        known = _keys_beside(model, error["loc"])
        close = get_close_matches(str(error["loc"][-1]), known, 1)
        known_ones = f"; known are {', '.join(known)}" if known else ": there are no settings here"
        return "unknown key" + (f"; did you mean '{close[0]}'?" if close else known_ones)
    if error["type"] == "too_short" and error["input"]:  # what was given is told to be wrong elsewhere
        return "nothing of it can be used"
    if error["type"] == "tuple_type" and isinstance(error["input"], dict):
        return f"expected a list of tables: [[{error['loc'][-1]}]]"
    if error["type"] == "tuple_type":
        return f"expected a list (got {error['input']!r})"
    message, given = error["msg"].removeprefix("Value error, "), repr(error["input"])
    if isinstance(error["input"], dict) or len(given) > LONGEST_VALUE:  # a whole table would bury the message
        return message
    return f"{message} (got {given})"


def _keys_beside(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """The keys that a table has, by the place of any key in it."""
    table: Any = model
    for key in place[:-1]:
        if isinstance(key, str):
            field = table.model_fields.get(key) or next(f for f in table.model_fields.values() if f.alias == key)
            table = next(
                kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
            )
    # `methods` is where the tables of methods are put together: nobody writes it.
    return [field.alias or name for name, field in table.model_fields.items() if name != "methods"]


def _kinds(annotation: Any) -> Iterator[Any]:
    """A type and all that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


def preset_names() -> list[str]:
    """The presets shipped with the package."""
    folder = resources.files(__package__) / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_raw(source: str | None) -> dict[str, Any]:
    """The raw tables of a preset name or a TOML file; nothing: an empty config."""
    if source is None:
        return {}
    if source in preset_names():
        content = (resources.files(__package__) / "presets" / f"{source}.toml").read_bytes()
    elif Path(source).is_file():
        content = Path(source).read_bytes()
    else:
        raise UserError(f"'{source}' is neither a file nor a preset; presets: {', '.join(preset_names()) or 'none'}")
    return parse_toml(content, source)


def parse_toml(content: bytes, where: str) -> dict[str, Any]:
    """The tables of a TOML file; `where` names it in messages."""
    try:
        return tomllib.loads(as_text(content, where))
    except tomllib.TOMLDecodeError as problem:
        raise UserError(f"{where} is not valid TOML: {problem}") from None


def override(raw: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply `key=value` settings (`train.optimiser.lr=0.1`); values are TOML, or else plain strings."""
    merged = copy.deepcopy(raw)
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise UserError(f"--set {setting!r}: expected key=value, for example train.epochs=2")
        table = merged
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise UserError(f"--set {setting!r}: '{key}' is a value, not a table")
        table[keys[-1]] = _toml_value(text.strip())
    return merged


def _toml_value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if found.keys() == {"value"} else text
