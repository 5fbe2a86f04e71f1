"""The server moves by Adam on the sites' mean change (FedAdam)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.components._server_steps import AdaptiveStep, StepComponent
from equipoise.contract.component import ServerSide


class ServerAdamServer(AdaptiveStep):
    """v <- beta2 v + (1 - beta2) change^2."""

    def squares(self, old: Tensor, new: Tensor) -> Tensor:
        return old.lerp(new, 1 - self.options.beta2)


class ServerAdam(StepComponent):
    """Server Adam."""

    name: ClassVar[str] = "server-adam"
    paper: ClassVar[str] = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    rank: ClassVar[int] = 74
    image_by_image: ClassVar[bool] = True
    Server: ClassVar[type[ServerSide]] = ServerAdamServer

    lr: PositiveFloat = Field(0.01, description="step size of the server")
    beta: float = Field(0.9, ge=0, lt=1, description="share of the running mean that stays")
    beta2: float = Field(0.99, ge=0, lt=1, description="share of the running square that stays")
    tau: PositiveFloat = Field(1e-3, description="added to the root of the running square")


COMPONENT = ServerAdam
