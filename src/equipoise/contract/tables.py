"""The general tables of a config: training, evaluation, checkpoints, computing, NPR, privacy and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from equipoise.core.outside import short_name
from equipoise.core.plugins import entry_names, is_plugin
from equipoise.core.suggestions import meant
from equipoise.core.table import LATER, Table
from equipoise.mask_metrics import MASK_METRICS
from equipoise.metrics import METRICS

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
