"""The server moves by Yogi on the sites' mean change: its running square grows slowly (FedYogi)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.components._server_steps import AdaptiveStep, StepComponent
from equipoise.contract.component import ServerSide


class ServerYogiServer(AdaptiveStep):
    """v <- v - (1 - beta2) change^2 sign(v - change^2)."""

    def squares(self, old: Tensor, new: Tensor) -> Tensor:
        return old - (1 - self.options.beta2) * new * (old - new).sign()


class ServerYogi(StepComponent):
    """Server Yogi."""

    name: ClassVar[str] = "server-yogi"
    paper: ClassVar[str] = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    rank: ClassVar[int] = 75
    image_by_image: ClassVar[bool] = True
    Server: ClassVar[type[ServerSide]] = ServerYogiServer

    lr: PositiveFloat = Field(0.01, description="step size of the server")
    beta: float = Field(0.9, ge=0, lt=1, description="share of the running mean that stays")
    beta2: float = Field(0.99, ge=0, lt=1, description="share of the running square that stays")
    tau: PositiveFloat = Field(1e-3, description="added to the root of the running square")


COMPONENT = ServerYogi
