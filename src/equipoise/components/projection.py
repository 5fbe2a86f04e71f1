"""A two-layer projection stands between body and head of the net (MOON's net; also FedProc's)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from equipoise.components._projection import projected_net
from equipoise.contract.component import Component
from equipoise.contract.setting import Setting


class Projection(Component):
    """Projection head."""

    name: ClassVar[str] = "projection"
    paper: ClassVar[str] = "Li et al., MOON, CVPR 2021"
    rank: ClassVar[int] = 5
    image_by_image: ClassVar[bool] = True

    size: PositiveInt = Field(256, description="size of the projected features")

    def holds(self) -> AbstractSet[str]:
        return {"head"}

    def needs(self) -> AbstractSet[str]:
        return {"pooled features"}

    def new_net(self, setting: Setting) -> Any:
        return projected_net(setting, self.size)


COMPONENT = Projection
