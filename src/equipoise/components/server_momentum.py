"""The server moves by a running sum of the sites' mean changes (FedAvgM), or a share of the way to their mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, PositiveFloat

from equipoise.components._merging import step_towards
from equipoise.components._server_steps import ServerStep, StepComponent
from equipoise.contract.component import ServerSide
from equipoise.contract.protocol import Replies, Tensors
from equipoise.nets import groups


class ServerMomentumServer(ServerStep):
    """v <- momentum v + change; w <- w + lr v. Without momentum, w goes a share `lr` of the way to the mean."""

    moments = ("velocity",)

    def setup(self) -> None:
        self.statistics = frozenset(groups(self.server.new_net())["statistics"])
        if self.options.momentum:
            super().setup()

    def after(self, number: int, updates: Replies, before: Tensors, model: Tensors) -> Tensors:
        if not self.options.momentum:
            return step_towards(before, model, self.options.lr, self.statistics)
        return super().after(number, updates, before, model)

    def step(self, change: Tensors) -> Tensors:
        old = self.state.velocity
        self.state.velocity = {name: self.options.momentum * old[name] + moved for name, moved in change.items()}
        return {name: self.options.lr * velocity for name, velocity in self.state.velocity.items()}


class ServerMomentum(StepComponent):
    """Server momentum."""

    name: ClassVar[str] = "server-momentum"
    paper: ClassVar[str] = "Hsu et al., FedAvgM, 2019; Reddi et al., ICLR 2021"
    rank: ClassVar[int] = 73
    image_by_image: ClassVar[bool] = True
    limit: ClassVar[Mapping[str, Any]] = {"momentum": 0, "lr": 1}
    Server: ClassVar[type[ServerSide]] = ServerMomentumServer

    lr: PositiveFloat = Field(1.0, description="step size of the server; 1 without momentum: the plain mean")
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the last step that goes into the next")

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        plain = self.lr == 1 and not self.momentum
        return {"lr": "without momentum a step size of 1 is the plain mean"} if plain else {}


COMPONENT = ServerMomentum
