"""FedIIC, for classes that are imbalanced over all sites. Margins by class difficulty calibrate the classifier.
Contrasts within a site and against the server's prototypes calibrate the features.

Wu et al., FedIIC: Towards Robust Federated Learning for Class-Imbalanced Medical Image Classification, MICCAI 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.inter_contrast import InterContrast
from equipoise.components.intra_contrast import IntraContrast
from equipoise.components.margins import Margins
from equipoise.components.projector import Projector
from equipoise.components.second_view import SecondView
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """FedIIC's weights and switches; the defaults are the paper's, read against the released code."""

    dala: bool = Field(True, description="difficulty-aware logit adjustment; off: the loss that train.loss names")
    exponent: float = Field(0.25, ge=0, description="d of the difficulty in the margins; 0: class frequency alone")
    difficulty_view: Literal["plain", "augmented", "cached"] = Field(
        "plain",
        description="images that difficulty is measured on: as in evaluation, a training view drawn anew each round, "
        "or one drawn once for all rounds (released)",
    )
    k1: float = Field(2.0, ge=0, description="weight of the contrast within a site; 0: off")
    power: float = Field(0.5, ge=0, description="t of the temperature (p_i p_j)^t; 0: the same for all classes")
    temperature: PositiveFloat = Field(1.0, description="tau, the factor of that temperature")
    floor: float = Field(0.07, ge=0, description="least temperature of the contrast within a site")
    k2: float = Field(2.0, ge=0, description="weight of the contrast against the server's prototypes; 0: off")
    prototype_temperature: PositiveFloat = Field(0.1, description="temperature of the contrast against prototypes")
    orthogonalise: bool = Field(True, description="drive the prototypes apart before they are sent")
    diagonal: Literal["zero", "exclude"] = Field(
        "zero", description="zero: rest at right angles (as released); exclude: as far apart as can be (Eq. 5)"
    )
    orthogonal_steps: PositiveInt = Field(1000, description="gradient steps that drive prototypes apart")
    orthogonal_lr: PositiveFloat = Field(0.1, description="their learning rate")
    projection: PositiveInt = Field(1024, description="size of the projected features")
    projector_relu: bool = Field(False, description="a ReLU between the projector's two layers (released: none)")
    two_views: Literal["auto", "always"] = Field(
        "auto", description="auto: a second view only where a contrast needs it; always: batch norm sees it anyway"
    )

    @property
    def contrastive(self) -> bool:
        """Whether either contrast is on, and so the projector is there."""
        return self.k1 > 0 or self.k2 > 0

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        found: dict[str, str] = {}
        if not self.dala:
            found |= dict.fromkeys(("exponent", "difficulty_view"), "fediic.dala is false")
        if not self.k1:
            found |= dict.fromkeys(("power", "temperature", "floor"), "fediic.k1 is 0")
        if not self.orthogonalise:
            found |= dict.fromkeys(("diagonal", "orthogonal_steps", "orthogonal_lr"), "fediic.orthogonalise is false")
        if not self.k2:
            about = ("prototype_temperature", "orthogonalise", "diagonal", "orthogonal_steps", "orthogonal_lr")
            found |= dict.fromkeys(about, "fediic.k2 is 0")
        if self.contrastive:
            found["two_views"] = "a contrast needs two views anyway"
        else:
            found |= dict.fromkeys(("projection", "projector_relu"), "fediic.k1 and fediic.k2 are 0")
        return found

    def components(self) -> Sequence[Component]:
        found: list[Component] = []
        if self.dala:
            found.append(Margins(exponent=self.exponent, difficulty_view=self.difficulty_view))
        if self.contrastive:
            found.append(Projector(size=self.projection, relu=self.projector_relu))
        elif self.two_views == "always":
            found.append(SecondView())
        if self.k1:
            found.append(
                IntraContrast(weight=self.k1, power=self.power, temperature=self.temperature, floor=self.floor)
            )
        if self.k2:
            found.append(
                InterContrast(
                    weight=self.k2,
                    temperature=self.prototype_temperature,
                    orthogonalise=self.orthogonalise,
                    diagonal=self.diagonal,
                    orthogonal_steps=self.orthogonal_steps,
                    orthogonal_lr=self.orthogonal_lr,
                )
            )
        return found


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=(
        "Wu et al., FedIIC: Towards Robust Federated Learning for Class-Imbalanced Medical Image Classification, "
        "MICCAI 2023"
    ),
    year=2023,
    changes="loss (margins, two contrasts), prototypes from the server",
    options=Options,
)
