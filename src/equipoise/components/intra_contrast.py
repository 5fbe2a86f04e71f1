"""Contrast within a site: projections of one class are drawn together, with a temperature by class counts (FedIIC)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.contract.component import Batch, Component, SiteSide
from equipoise.losses import intra_client_contrastive


class IntraContrastSite(SiteSide):
    """Adds the contrast to the loss."""

    def loss(self, batch: Batch, out: Any, loss: Tensor) -> Tensor:
        options = self.options
        return loss + options.weight * intra_client_contrastive(
            out.units, batch.label, self.class_counts, options.power, options.temperature, options.floor
        )


class IntraContrast(Component):
    """Intra-client contrast (Eq. 3)."""

    name: ClassVar[str] = "intra-contrast"
    paper: ClassVar[str] = "Wu et al., FedIIC, MICCAI 2023"
    rank: ClassVar[int] = 40
    limit: ClassVar[Mapping[str, Any]] = {"weight": 0}
    Site: ClassVar[type[SiteSide]] = IntraContrastSite

    weight: float = Field(2.0, ge=0, description="k1, weight of the contrast")
    power: float = Field(0.5, ge=0, description="t of the temperature (p_i p_j)^t; 0: the same for all classes")
    temperature: PositiveFloat = Field(1.0, description="tau, the factor of that temperature")
    floor: float = Field(0.07, ge=0, description="least temperature")

    def needs(self) -> AbstractSet[str]:
        return {"projections", "image labels"}


COMPONENT = IntraContrast
