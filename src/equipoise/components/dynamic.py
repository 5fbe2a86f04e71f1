"""Each site's loss gets a linear and a quadratic term that change from round to round. The server corrects the mean by
the sites' drift so far (FedDyn)."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
from pydantic import Field

from equipoise.components._drift import COUNT_DISCLOSURE, AnchoredSite, RosterServer, RosterSite, beside
from equipoise.contract.component import Component, ServerSide, Sheet, SiteSide
from equipoise.contract.protocol import Payload, Replies, Tensors, Work


class DynamicServer(RosterServer):
    """Keeps h / alpha (`correction`), the mean of what all sites keep, and takes it off the mean of their models.

    The means are by train.aggregation ("uniform": as in the paper).
    """

    def setup(self) -> None:
        self.state.correction = dict(beside(self.server.new_net()).named_buffers())

    def after(self, number: int, updates: Replies, before: Tensors, model: Tensors) -> Tensors:
        share = self.participation(updates)
        self.state.correction = {
            name: old.sub(model[name] - before[name], alpha=share) for name, old in self.state.correction.items()
        }
        return model | {name: model[name] - correction for name, correction in self.state.correction.items()}


class DynamicSite(AnchoredSite, RosterSite):
    """Keeps its linear term, over alpha, as an `offset` of the anchor.

    loss - <g, w> + alpha/2 |w - w_global|^2 is, up to a constant, loss + alpha/2 |w - w_global - g/alpha|^2.
    """

    @property
    def pull(self) -> float:  # type: ignore[override]
        return self.options.alpha

    def build(self) -> None:
        super().build()
        self.offset = beside(self.client.net)
        self.keeps("offset", self.offset)

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        yield from super().begin(message)
        torch._foreach_add_(list(self.anchor.buffers()), list(self.offset.buffers()))

    def reply(self) -> Generator[Work, Any, Payload]:
        """g <- g - alpha (w - w_global), which is alpha times anchor - w."""
        torch._foreach_copy_(list(self.offset.buffers()), torch._foreach_neg(self.drift()))
        yield from ()
        return {}


class Dynamic(Component):
    """Dynamic regularisation."""

    name: ClassVar[str] = "dynamic"
    paper: ClassVar[str] = "Acar et al., FedDyn, ICLR 2021"
    rank: ClassVar[int] = 71
    image_by_image: ClassVar[bool] = True
    Site: ClassVar[type[SiteSide]] = DynamicSite
    Server: ClassVar[type[ServerSide]] = DynamicServer

    alpha: float = Field(0.01, gt=0, description="weight of the dynamic terms")

    def needs(self) -> AbstractSet[str]:
        return {"model", "whole model", "one model", "net trains", "one training ask"}

    def discloses(self) -> Sheet:
        return COUNT_DISCLOSURE


COMPONENT = Dynamic
