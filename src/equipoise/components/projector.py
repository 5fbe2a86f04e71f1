"""A projector of features: two views of each image in one forward pass, and what two layers make of their features.

The contrasts of FedIIC compare these projections. The server averages the projectors of the sites.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from equipoise.components._merging import average
from equipoise.components.second_view import SecondView, SecondViewSite
from equipoise.contract.component import Batch, Message, ServerSide, Sheet, SiteSide
from equipoise.contract.modules import share
from equipoise.contract.protocol import Payload, Replies, Tensors, Work
from equipoise.contract.setting import Setting
from equipoise.contract.summed import averaged


class ProjectorServer(ServerSide):
    """Averages the projectors."""

    def setup(self) -> None:
        self.module = self.options.new_projector(self.setting, self.server.new_net().feature_size)
        self.state.projector = self.module.state_dict()

    def message(self, number: int) -> Message:
        return {"projector": self.state.projector}

    def after(self, number: int, updates: Replies, before: Tensors, model: Tensors) -> Tensors:
        self.state.projector = average(updates, "projector", self.weighting)
        return model


class ProjectorSite(SecondViewSite):
    """Trains the projector beside the net."""

    def build(self) -> None:
        super().build()
        self.module = self.options.new_projector(self.setting, self.client.net.feature_size)
        self.receives("projector", self.module)
        self.trains_beside(self.module)

    def reply(self) -> Generator[Work, Any, Payload]:
        yield from ()
        return {"projector": share(self.module)}

    def forward(self, batch: Batch, out: Any) -> None:
        """Projections (B, 2, P) of both views."""
        pieces = getattr(out, "pieces", {})
        if self.options.name in pieces:
            alone = len(pieces) == 1
            features = out.joint if alone else torch.cat([out.features, pieces[self.options.name]])
            out.projections = self.module(features).unflatten(0, (2, -1)).transpose(0, 1)

    def loss(self, batch: Batch, out: Any, loss: Tensor) -> Tensor:
        out.units = F.normalize(out.projections, dim=-1)
        return loss


class Projector(SecondView):
    """Projections of two views."""

    name: ClassVar[str] = "projector"
    rank: ClassVar[int] = 30
    Site: ClassVar[type[SiteSide]] = ProjectorSite
    Server: ClassVar[type[ServerSide]] = ProjectorServer

    size: PositiveInt = Field(1024, description="size of the projected features")
    relu: bool = Field(False, description="a ReLU between the projector's two layers (released: none)")

    def needs(self) -> AbstractSet[str]:
        return {"plain forward", "model", "one loss", "one training ask", "pooled features"}

    def gives(self) -> AbstractSet[str]:
        return {"second view", "projections"}

    def discloses(self) -> Sheet:
        return {"train": {"projector": averaged("the projector's weights after local training")}}

    def new_projector(self, setting: Setting, feature_size: int) -> nn.Module:
        """The projector h: features (B, D) -> (B, size), the same at first everywhere."""

        def make() -> nn.Module:
            layers: dict[str, nn.Module] = {"hidden": nn.Linear(feature_size, feature_size)}
            if self.relu:
                layers["relu"] = nn.ReLU()
            layers["output"] = nn.Linear(feature_size, self.size)
            return nn.Sequential(OrderedDict(layers))

        return setting.seeded("projector", make)


COMPONENT = Projector
