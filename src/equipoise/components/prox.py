"""A proximal term holds sites to the received model: mu/2 |w - w_global|^2 (FedProx)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field

from equipoise.components._drift import AnchoredSite
from equipoise.contract.component import Component, SiteSide


class ProxSite(AnchoredSite):
    """Trains near the received net."""

    @property
    def pull(self) -> float:  # type: ignore[override]
        return self.options.mu


class Prox(Component):
    """Proximal term."""

    name: ClassVar[str] = "prox"
    paper: ClassVar[str] = "Li et al., FedProx, MLSys 2020"
    rank: ClassVar[int] = 70
    image_by_image: ClassVar[bool] = True
    limit: ClassVar[Mapping[str, Any]] = {"mu": 0}
    Site: ClassVar[type[SiteSide]] = ProxSite

    mu: float = Field(0.01, ge=0, description="weight of the proximal term; 0: none")

    def needs(self) -> AbstractSet[str]:
        return {"model", "net trains", "one training ask"}

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return {} if self.mu else {"mu": "a weight of 0 leaves the loss unchanged"}


COMPONENT = Prox
