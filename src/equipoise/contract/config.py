"""Everything a run depends on, typed and validated, read from TOML.

Method options live in a table named after the method (`[fedprox] mu = 0.01`). So one file can hold the options of
several methods. Tables of methods that do not run are checked and otherwise ignored.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from equipoise.core.device_names import decisive_part
from equipoise.core.errors import UserError, parse_toml
from equipoise.core.outside import short_name
from equipoise.core.plugins import entry_names, is_plugin
from equipoise.core.suggestions import meant, meant_or_all
from equipoise.core.table import LATER, Table, drop_later
from equipoise.core.validation import validated
from equipoise.data.augment.augment_config import AugmentConfig
from equipoise.data.data_config import DataConfig
from equipoise.mask_metrics import MASK_METRICS
from equipoise.metrics import METRICS
from equipoise.nets.net_config import NetConfig

Decay = Annotated[float, Field(ge=0, lt=1)]
"""What a moving average keeps of its past at each step."""

#: metrics that a round may be chosen by; those from outside are checked where they are loaded
CHOOSING = tuple(metric.name for metric in (*MASK_METRICS, *METRICS) if metric.chooses)


def _chooses(name: str) -> str:
    """Refuse a metric that no round can be chosen by."""
    if name not in CHOOSING and not is_plugin("metric", name):
        close = meant(name, [*CHOOSING, *entry_names("metric")])
        hint = f"did you mean '{close}'?" if close else f"choose one of {', '.join(CHOOSING)}"
        raise ValueError(f"no round can be chosen by '{name}'; {hint}")
    return name


if TYPE_CHECKING:
    ChoosingMetric = str
else:
    #: names in words for lists of settings; a metric from outside is `file.py:NAME` or `package.module:NAME`
    ChoosingMetric = Annotated[Literal[CHOOSING] | str, AfterValidator(_chooses)]


class OptimiserConfig(Table):
    """The optimiser of a site's local training."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="the kind of step")
    lr: PositiveFloat = Field(0.02, description="learning rate of the first round")
    momentum: Decay = Field(0.9, description="SGD only")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Adam and AdamW only")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty in the gradient; AdamW: decoupled, times the rate")
    decay_absent: bool = Field(
        True,
        description="false: no weight decay for the head's rows of classes without training images at the site",
        json_schema_extra=LATER,
    )
    keep: bool = Field(False, description="keep the moments from round to round instead of starting anew")
    clip: PositiveFloat | None = Field(None, description="largest norm of a step's gradient")

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        found = {"betas": "SGD has none"} if self.name == "sgd" else {"momentum": f"{self.name} has betas instead"}
        return found if self.weight_decay else found | {"decay_absent": "weight_decay is 0"}


class ScheduleConfig(Table):
    """The learning rate's factor in round r (counted from 0)."""

    name: Literal["constant", "step", "multistep", "exponential"] = Field(
        "constant", description="exponential: multiply by gamma after each round"
    )
    every: PositiveInt = Field(10, description="step: rounds between two multiplications by gamma")
    milestones: tuple[NonNegativeInt, ...] = Field((), description="multistep: rounds after which gamma multiplies")
    gamma: float = Field(0.5, gt=0, le=1, description="factor of one decay")

    def without_effect(self, setting: Any = None) -> dict[str, str]:
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
    epochs: PositiveInt = Field(
        3, description="passes over a site's training images in a round; PRR needs three for its third step"
    )
    steps: PositiveInt | None = Field(None, description="local steps a round, instead of epochs")
    batch_size: int = Field(32, ge=2, description="batch size of local training")
    loss: str = Field("ce", description="supervised loss: ce, or the name of a loss among `equipoise components`")
    optimiser: OptimiserConfig = OptimiserConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    participation: float = Field(1.0, gt=0, le=1, description="share of the sites drawn in each round")
    min_sites: PositiveInt = Field(1, description="a round with fewer answers is repeated")
    aggregation: Literal["size", "uniform"] = Field("size", description="weights of the sites in averages")

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return {"epochs": "train.steps is set"} if self.steps else {}


class EvaluationConfig(Table):
    """When models are measured and how the reported one is chosen. Only validation data decides."""

    every: PositiveInt = Field(1, description="rounds between two evaluations")
    batch_size: PositiveInt = Field(256, description="images at a time")
    rule: Literal["best", "last", "mean_last"] = Field(
        "best", description="reported round: the best on validation data, the last, or the mean of the last ones"
    )
    metric: ChoosingMetric = Field(
        METRICS[0].name, description="validation score that selects the round; default for segmentation: dice"
    )
    view: Literal["auto", "global", "personal"] = Field(
        "auto",
        description="models whose validation score selects the round; auto: personal models if the method has them. "
        "With global, sites fine-tune and measure personal models only at the end",
    )
    select: Literal["federation", "site"] = Field(
        "federation", description="one round for all, or for each site the best round of its personal model"
    )
    first_round: PositiveInt = Field(1, description="rounds before this one are never selected")
    last: PositiveInt = Field(5, description="mean_last: number of rounds")
    trained: bool = Field(True, description="also measure right after local training (retrogress)")
    trained_test: bool = Field(False, description="report test scores right after local training too (FedNPR's)")
    test: Literal["selected", "always"] = Field("selected", description="when the test part is measured")

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        unused = {"best": ("last",), "last": ("first_round", "last"), "mean_last": ()}[self.rule]
        return dict.fromkeys(unused, f"evaluation.rule is {self.rule}")

    @property
    def score(self) -> str:
        """What the scores of the deciding metric are called."""
        return short_name(self.metric)

    def may_report(self, number: int, rounds: int) -> bool:
        """Whether test scores of a round may be part of a run's results, as far as can be known before its end."""
        first = {"best": 1, "last": rounds, "mean_last": rounds - self.last + 1}[self.rule]
        measured = number % self.every == 0 or number == rounds
        return measured and number >= max(self.earliest, first)

    @property
    def earliest(self) -> int:
        """The first round that may be selected; where the last one is, `first_round` says nothing."""
        return 1 if self.rule == "last" else self.first_round

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

    keep: PositiveInt = Field(2, description="number of last rounds to keep, besides the rounds that they selected")
    every: PositiveInt = Field(1, description="rounds between checkpoints")


class ComputeConfig(Table):
    """Where and how the arithmetic runs. `threads`, `device`, `precision` and `channels_last` change bits."""

    device: str = Field(
        "auto", description="cpu, cuda or cuda:1; sites spread over cuda:0,cuda:1 or cpu:2; auto: a GPU, if any"
    )
    workers: PositiveInt = Field(1, description="worker processes on a CPU; scores do not depend on them")
    threads: int = Field(1, ge=1, le=1024, description="threads of a process")
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32", description="precision of nets on a GPU; bf16 uses autocast"
    )
    channels_last: bool = Field(False, description="memory layout of images; Equipoise's kernels need channels_last")
    deterministic: bool = Field(True, description="deterministic GPU kernels")
    slots: int = Field(0, ge=0, description="models in training at a time on a GPU; 0: as many as fit")
    capture: bool = Field(True, description="replay captured steps on a GPU")


class NprConfig(Table):
    """Sub-cluster prototypes as a regulariser of any method (FedNPR)."""

    weight: float = Field(0.0, ge=0, description="lambda of Eq. 5; 0: none; 1: what the released code computes")
    clusters: PositiveInt = Field(4, description="K, sub-clusters of each class")
    cluster: Literal["sinkhorn", "random", "released"] = Field("sinkhorn", description="how features are sorted")
    normalise: Literal["layernorm", "none", "temperature"] = Field("layernorm", description="of the cosines")
    classes: Literal["present", "all"] = Field(
        "present",
        description="classes in layer norm and softmax; present: those with sub-clusters at the site; all (as "
        "released): the rest enter as random directions",
        json_schema_extra=LATER,
    )
    temperature: PositiveFloat = Field(0.1, description="divides cosines where normalise is temperature")
    view: Literal["plain", "augmented"] = Field("plain", description="views of the images that form the sub-clusters")
    supervised: bool = Field(True, description="false: NPR alone trains, the nearest prototype predicts")

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        if not self.weight:
            keys = ("clusters", "cluster", "normalise", "classes", "temperature", "view")
            return dict.fromkeys(keys, "npr.weight is 0")
        return {} if self.normalise == "temperature" else {"temperature": f"npr.normalise is {self.normalise}"}

    @model_validator(mode="after")
    def _something_trains(self) -> NprConfig:
        if not self.supervised and self.weight == 0:
            raise ValueError("npr.supervised = false leaves nothing to train by: set npr.weight above 0")
        return self


#: sites of a secure sum, at least
LEAST_SUMMED = 3


class PrivacyConfig(Table):
    """What may leave a site."""

    least: int = Field(
        0, ge=0, description="a count, sum or mean of fewer images never leaves a site", json_schema_extra=LATER
    )
    secure_sums: bool = Field(
        False,
        description="the server sees only sums over sites of models, counts and evaluations; needs three sites",
        json_schema_extra=LATER,
    )
    update_bound: PositiveFloat = Field(
        10.0,
        description="with secure_sums: a site withholds an update that is longer than this multiple of the weights "
        "that it received",
        json_schema_extra=LATER,
    )
    epsilon: PositiveFloat | None = Field(
        None,
        description="epsilon of differential privacy for one image, over all that leaves a site in a run; none: off",
        json_schema_extra=LATER,
    )
    delta: float = Field(
        1e-5,
        gt=0,
        lt=1,
        description="delta: chance that epsilon does not hold; below 1 / images of a site",
        json_schema_extra=LATER,
    )
    clip: PositiveFloat = Field(
        1.0, description="largest gradient norm of one image under privacy.epsilon", json_schema_extra=LATER
    )
    counts_noise: PositiveFloat = Field(
        10.0,
        description="under privacy.epsilon: standard deviation of the noise on a site's images of each class",
        json_schema_extra=LATER,
    )

    @property
    def limit(self) -> int:
        """The number of images below which nothing leaves a site; under privacy.epsilon noise hides single images."""
        return 0 if self.epsilon else self.least

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        idle = {} if self.secure_sums else {"update_bound": "privacy.secure_sums is not set"}
        if self.epsilon:
            return idle | {"least": "privacy.epsilon hides single images by noise"}
        return idle | dict.fromkeys(("delta", "clip", "counts_noise"), "privacy.epsilon is not set")


class ReportConfig(Table):
    """What a run's report may show."""

    images: Literal["auto", "shown", "hidden"] = Field(
        "auto",
        description="examples of images in reports; auto: of the phantom alone. Show real ones only where their owner "
        "allows it",
        json_schema_extra=LATER,
    )


#: what does not change a run's results
_INDIFFERENT: Any = {
    "report": True,
    "name": True,
    "compute": {"workers", "slots", "capture"},
    "checkpoint": True,
    "data": {"root", "store"},
    "net": {"encoder_digest"},
    "plugins": True,
}


class Config(Table):
    """A whole run."""

    name: str = Field("", description="the run's name; empty: made of method, data and seed")
    method: str = Field("fedavg", description="see `equipoise methods`")
    seed: int = Field(1, ge=0, lt=2**32, description="random seed for splits, weights and batches")
    data: DataConfig = DataConfig()
    net: NetConfig = NetConfig()
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    compute: ComputeConfig = ComputeConfig()
    npr: NprConfig = NprConfig()
    privacy: PrivacyConfig = Field(PrivacyConfig(), json_schema_extra=LATER)
    report: ReportConfig = Field(ReportConfig(), json_schema_extra=LATER)
    components: tuple[str, ...] = Field(
        (), description="components added to the method, see `equipoise components`", json_schema_extra=LATER
    )
    plugins: dict[str, str] = Field(
        {},
        description="hashes of the source of plug-ins, written by runs and compared by sites",
        json_schema_extra=LATER,
    )
    methods: dict[str, dict[str, Any]] = Field({}, description="option tables of methods and components, by name")

    @field_validator("components")
    @classmethod
    def _in_one_order(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(names)))

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.name in (".", "..") or any(mark in self.name for mark in "/\\\0"):
            raise ValueError(f"name = {self.name!r} is no folder name; the run's place is --out")
        if self.evaluation.earliest > self.train.rounds:
            raise ValueError(
                f"evaluation.first_round = {self.evaluation.first_round} lies after the last round "
                f"(train.rounds = {self.train.rounds}): no round could be selected; set it to 1, say"
            )
        return self

    @property
    def run_name(self) -> str:
        """The name of the run's folder."""
        name = short_name(self.data.name) if is_plugin("source", self.data.name) else self.data.name
        data = name.replace(":", "-").replace("/", "-").strip("-.")
        return self.name or f"{self.composition}-{data}-seed{self.seed}"

    @property
    def composition(self) -> str:
        """The method's name, with the components that were put on it: `fedbn+margins+npr`."""
        return "+".join([short_name(self.method), *sorted(map(short_name, self.components))])

    def used_plugins(self) -> list[tuple[str, str]]:
        """The kinds and names of what this run takes from outside the package."""
        parts = [("method", self.method), *(("component", name) for name in self.components)]
        parts += [("net", self.net.name), ("source", self.data.name)]
        parts += [("loss", self.train.loss), ("metric", self.evaluation.metric)]
        return [(kind, name) for kind, name in parts if is_plugin(kind, name)]

    @property
    def least_answers(self) -> int:
        """The answers that a round needs at least: a sum over two sites would tell each of them the other's part."""
        return max(self.train.min_sites, LEAST_SUMMED if self.privacy.secure_sums else 1)

    def may_report(self, number: int) -> bool:
        """Whether test scores of this round may be part of the results, as far as can be known before the end."""
        return self.evaluation.may_report(number, self.train.rounds)

    def with_rounds(self, rounds: int) -> Config:
        """The same config with another number of rounds."""
        return self.model_copy(update={"train": self.train.model_copy(update={"rounds": rounds})})

    def digest(self) -> str:
        """Identifies what decides a run's results; two runs with one digest, on one kind of device, give the same
        bits."""
        decisive = self.model_dump(mode="json", exclude=_INDIFFERENT)
        drop_later(self, decisive)
        decisive["compute"]["device"] = decisive_part(self.compute.device)
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """The resolved config as TOML, readable by `load_config`."""
        raw = self.model_dump(mode="json", exclude_none=True)
        for empty in ("components", "plugins"):
            if not getattr(self, empty):
                del raw[empty]
        if self.privacy == PrivacyConfig():
            del raw["privacy"]
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
        raise UserError(f"'{source}' is neither a file nor a preset; {meant_or_all(source, preset_names(), 'presets')}")
    tables = parse_toml(content, source)
    if {"row", "seeds"} & tables.keys():
        raise UserError(f"{source} is a study of several runs; start it with: equipoise study {source}")
    return tables


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
