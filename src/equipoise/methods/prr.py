"""PRR-Imbalance: sites share the low frequencies of a deputy model's weights (PFA). The deputy teaches a personal model
step by step (DET). The loss corrects the federation's class imbalance (CPA).

Chen et al., Personalized Retrogress-Resilient Federated Learning Toward Imbalanced Medical Data, IEEE TMI 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.cpa import CPA, Alignment
from equipoise.components.deputy import Deputy, next_stage
from equipoise.components.fourier import Fourier
from equipoise.components.local_norm import LocalNorm
from equipoise.components.mean_model import MeanModel
from equipoise.contract.component import Component
from equipoise.contract.method import Method
from equipoise.contract.tables import TrainConfig

__all__ = ["METHOD", "Options", "next_stage"]


class Options(Alignment):
    """PFA, DET and CPA, each with its switch; the defaults are the paper's, read against the released code."""

    distinctive: ClassVar[tuple[str, ...]] = ("det", "cpa_local")
    in_short: ClassVar[tuple[str, ...]] = ("prr.warmup=0", "train.epochs=3")

    pfa: Literal["off", "both", "amplitude", "phase", "complex"] = Field(
        "both",
        description="part of the low frequencies that sites share; complex: mean of complex numbers; off: plain mean",
    )
    band_start: float = Field(0.7, ge=0, le=1, description="share of frequencies shared in the first round, 2 r_0")
    band_end: float = Field(0.95, ge=0, le=1, description="limit that this share grows towards, 2 r_1")
    classifier_rows: bool = Field(True, description="transform the last layer class by class, not as a matrix")

    det: Literal["off", "E", "ER", "ERS"] = Field(
        "ERS", description="steps of the transfer: exchange, recover, sublimate; off: one net, no deputy"
    )
    recover: float = Field(
        0.7, ge=0, le=1, description="lambda_1: below this share of the personal score, a deputy recovers"
    )
    sublimate: float = Field(
        0.9, ge=0, le=1, description="lambda_2: above this share of the personal score, it teaches"
    )
    det_metric: Literal["valid", "train", "released"] = Field(
        "valid",
        description="images whose macro F1 (of masks: Dice) moves the steps; train: augmented, counted while training; "
        "released: augmented, in a separate pass",
    )

    cpa_global: bool = Field(True, description="rebalance logits by the federation's class counts (Eq. 9)")
    cpa_local: bool = Field(True, description="weigh classes by the distance of local and global prototypes (Eq. 11)")
    prototype_exchange: Literal["round", "epoch", "released"] = Field(
        "round",
        description="when sites exchange prototypes; epoch: after each local epoch; released: likewise, but each "
        "round begins with prototypes of ones",
    )

    global_view: bool = Field(
        False, description="also report the mean of all deputies as a global model; batch norm then leaves the sites"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Options:
        if self.band_start > self.band_end:
            raise ValueError(f"band_start = {self.band_start} is above band_end = {self.band_end}")
        if self.recover > self.sublimate:
            raise ValueError(f"recover = {self.recover} is above sublimate = {self.sublimate}")
        return self

    def components(self) -> Sequence[Component]:
        found: list[Component] = [
            LocalNorm(),
            Fourier(
                share=self.pfa,
                band_start=self.band_start,
                band_end=self.band_end,
                classifier_rows=self.classifier_rows,
            ),
            CPA(
                counts="federation" if self.cpa_global else "none",
                prototypes=self.cpa_local,
                beta=self.beta,
                tau=self.tau,
                warmup=self.warmup,
                spread=self.spread,
                exchange=self.prototype_exchange,
            ),
        ]
        if self.det != "off":
            found.append(Deputy(steps=self.det, recover=self.recover, sublimate=self.sublimate, metric=self.det_metric))
        if self.global_view:
            found.append(MeanModel())
        return found

    @property
    def staged(self) -> bool:
        """Whether scores decide the steps of the transfer; exchange alone never changes."""
        return self.det in ("ER", "ERS")

    def without_effect(self, setting: Any = None) -> dict[str, str]:
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
        return found if setting is None else found | self._idle_in(setting.config.train)

    def _idle_in(self, train: TrainConfig) -> dict[str, str]:
        """The switches whose parts cannot act in so few epochs or rounds."""
        found: dict[str, str] = {}
        if self.staged and train.epochs == 1:
            found["det"] = (
                "with train.epochs = 1, prr is local training: sites receive nothing from each other. Set "
                "train.epochs to 3 or more"
            )
        elif self.det == "ERS" and train.epochs == 2:
            found["det"] = "prr never sublimates: with train.epochs = 2 a round ends before its third step"
        if self.cpa_local and self.warmup >= train.rounds:
            found["cpa_local"] = f"none of {train.rounds} rounds is after prr.warmup = {self.warmup}"
        elif self.cpa_local and self.prototype_exchange == "released" and train.epochs == 1:
            found["cpa_local"] = (
                'with prr.prototype_exchange = "released" and train.epochs = 1 no epoch has prototypes but ones'
            )
        return found


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Chen et al., Personalized Retrogress-Resilient Federated Learning Toward Imbalanced Medical Data, TMI 2022",
    year=2022,
    changes="aggregation (Fourier), personalisation (deputy), loss (prototypes)",
    options=Options,
    defaults={"train": {"aggregation": "uniform"}},
    names={"stays": "norm"},
)
