"""Everything a run depends on, typed and validated, read from TOML.

Method options live in a table named after the method (`[fedprox] mu = 0.01`). So one file can hold the options of
several methods. Tables of methods that do not run are checked and otherwise ignored.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import tomli_w
from pydantic import Field, field_validator, model_validator

from equipoise.contract.tables import (
    LEAST_SUMMED,
    CheckpointConfig,
    ComputeConfig,
    EvaluationConfig,
    NprConfig,
    PrivacyConfig,
    ReportConfig,
    TrainConfig,
)
from equipoise.core.device_names import decisive_part
from equipoise.core.outside import short_name
from equipoise.core.plugins import is_plugin
from equipoise.core.table import LATER, Table, drop_later
from equipoise.data.augment.augment_config import AugmentConfig
from equipoise.data.data_config import DataConfig
from equipoise.nets.net_config import NetConfig

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
