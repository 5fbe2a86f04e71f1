"""A second augmented view of each image goes through the net with the first, so that batch norm sees both (FedIIC)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import ClassVar

from torch import Tensor

from equipoise.contract.component import Batch, Component, SiteSide


class SecondViewSite(SiteSide):
    """Shows both views to the net in one pass."""

    def build(self) -> None:
        self.client.workplace.image_views = 2

    def images(self, batch: Batch) -> Tensor | None:
        return getattr(batch, "second", None)


class SecondView(Component):
    """Two views of each image in one forward pass."""

    name: ClassVar[str] = "second-view"
    paper: ClassVar[str] = "Wu et al., FedIIC, MICCAI 2023"
    rank: ClassVar[int] = 30
    Site: ClassVar[type[SiteSide]] = SecondViewSite

    def needs(self) -> AbstractSet[str]:
        return {"plain forward", "image labels"}

    def gives(self) -> AbstractSet[str]:
        return {"second view"}


COMPONENT = SecondView
