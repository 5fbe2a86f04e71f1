"""Restricted softmax: a site scales down the logits of classes that it lacks, under any loss (FedRS)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from equipoise.contract.component import Component, SiteSide
from equipoise.core.table import LATER
from equipoise.losses import graded_factors, restricted_logits


class RestrictedSite(SiteSide):
    """Scales logits before the supervised loss sees them; prediction uses plain logits."""

    def logits(self, logits: Tensor) -> Tensor:
        if self.options.alpha == 1:
            return logits
        if self.options.graded:
            return logits * graded_factors(self.class_counts, self.options.alpha).to(logits.dtype)
        return restricted_logits(logits, self.class_counts > 0, self.options.alpha)


class Restricted(Component):
    """Restricted softmax."""

    name: ClassVar[str] = "restricted"
    paper: ClassVar[str] = "Li and Zhan, FedRS, KDD 2021"
    rank: ClassVar[int] = 15
    image_by_image: ClassVar[bool] = True
    limit: ClassVar[Mapping[str, Any]] = {"alpha": 1}
    Site: ClassVar[type[SiteSide]] = RestrictedSite

    alpha: float = Field(0.5, ge=0, le=1, description="factor of the logits of missing classes; 1: all alike")

    graded: bool = Field(
        False,
        description="scale every class by alpha + (1 - alpha) n_c / n_max, as released; false: missing classes alone",
        json_schema_extra=LATER,
    )

    def needs(self) -> AbstractSet[str]:
        return {"supervised", "all classes", "sites"}

    def lacks(self) -> AbstractSet[str]:
        return set() if self.alpha else {"absent classes"}  # such a class's logit is 0 for any weights

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return dict.fromkeys(("alpha", "graded"), "alpha = 1 leaves all logits unchanged") if self.alpha == 1 else {}


COMPONENT = Restricted
