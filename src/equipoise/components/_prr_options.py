"""The switches of PRR-Imbalance (Chen et al., 2022): one for every row of its ablations and analyses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from equipoise.contract.config import Config, Table
from equipoise.core.errors import UserError


class PRROptions(Table):
    """PFA, DET and CPA, each with its switch; the defaults are the paper's, read against the released code."""

    pfa: Literal["off", "both", "amplitude", "phase", "complex"] = Field(
        "both", description="what sites share of low frequencies; complex: mean of complex numbers; off: plain mean"
    )
    band_start: float = Field(0.7, ge=0, le=1, description="share of frequencies shared in the first round, 2 r_0")
    band_end: float = Field(0.95, ge=0, le=1, description="what that share grows towards, 2 r_1")
    classifier_rows: bool = Field(True, description="transform the last layer class by class, not as a matrix")

    det: Literal["off", "E", "ER", "ERS"] = Field(
        "ERS", description="steps of the transfer: exchange, recover, sublimate; off: one net, no deputy"
    )
    recover: float = Field(0.7, ge=0, le=1, description="lambda_1: a deputy with a smaller share of the score recovers")
    sublimate: float = Field(0.9, ge=0, le=1, description="lambda_2: a deputy with a greater share of it teaches")
    det_metric: Literal["valid", "train", "released"] = Field(
        "valid",
        description="images whose macro F1 moves the steps; train: augmented, counted while training; "
        "released: augmented, in a pass of their own",
    )

    cpa_global: bool = Field(True, description="logits compete by the federation's class counts (Eq. 9)")
    cpa_local: bool = Field(True, description="classes weigh by how far local and global prototypes part (Eq. 11)")
    beta: float = Field(0.8, ge=0, description="exponent of the ratio of class counts; 0: plain softmax")
    tau: float = Field(3.0, ge=1, description="Eq. 12: the smaller, the more a distance between prototypes weighs")
    warmup: int = Field(15, ge=0, description="rounds before prototypes begin to weigh")
    spread: Literal["biased", "clamped", "none"] = Field(
        "biased", description="deviation around the mean of prototypes: the paper's, the released (>= 1), or none"
    )
    prototype_exchange: Literal["round", "epoch", "released"] = Field(
        "round",
        description="how often prototypes travel; epoch: after each local epoch; "
        "released: so too, and every round begins with prototypes of ones",
    )

    global_view: bool = Field(
        False, description="also report the mean of all deputies as a global model; batch norm then leaves the sites"
    )

    @model_validator(mode="after")
    def _ordered(self) -> PRROptions:
        if self.band_start > self.band_end:
            raise ValueError(f"band_start = {self.band_start} is above band_end = {self.band_end}")
        if self.recover > self.sublimate:
            raise ValueError(f"recover = {self.recover} is above sublimate = {self.sublimate}")
        return self

    def unused(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.pfa == "off":
            found |= dict.fromkeys(("band_start", "band_end", "classifier_rows"), 'prr.pfa is "off"')
        if self.det != "ERS":
            idle = ("sublimate",) if self.staged else ("recover", "sublimate", "det_metric")
            found |= dict.fromkeys(idle, f'prr.det is "{self.det}"')
        if not self.cpa_global:
            found["beta"] = "prr.cpa_global is false"
        if not self.cpa_local:
            found |= dict.fromkeys(("tau", "warmup", "spread", "prototype_exchange"), "prr.cpa_local is false")
        return found

    def check(self, config: Config) -> None:
        """Refuse training settings that these switches would silently overrule."""
        if (self.cpa_global or self.cpa_local) and config.train.loss != "ce":
            raise UserError(
                f"train.loss = {config.train.loss!r}, but prr trains by its CPA loss; for another loss set "
                "prr.cpa_global and prr.cpa_local to false"
            )
        if self.by_epoch and config.train.steps is not None:
            raise UserError("prr decides after each local epoch what is next: set train.epochs, not train.steps")

    @property
    def paired(self) -> bool:
        """Whether a site trains a personal net beside the deputy."""
        return self.det != "off"

    @property
    def staged(self) -> bool:
        """Whether scores decide the steps of the transfer; exchange alone never changes."""
        return self.det in ("ER", "ERS")

    @property
    def by_epoch(self) -> bool:
        """Whether something is decided or renewed after each local epoch."""
        return self.staged or self.cpa_local

    @property
    def asks_by_epoch(self) -> bool:
        """Whether a round is one ask for each local epoch."""
        return self.cpa_local and self.prototype_exchange != "round"

    @property
    def forgets_prototypes(self) -> bool:
        """Whether a round begins without the prototypes of the one before."""
        return self.cpa_local and self.prototype_exchange == "released"

    @property
    def sends_last_prototypes(self) -> bool:
        """Whether anybody asks for the prototypes of a round's last epoch."""
        return self.cpa_local and not self.forgets_prototypes

    @property
    def phase(self) -> str:
        """How PFA averages phases, for `fourier_average`."""
        return "complex" if self.pfa == "complex" else "angle"

    @property
    def parts(self) -> str:
        """What PFA averages, for `fourier_average`."""
        return self.pfa if self.pfa in ("amplitude", "phase") else "both"
