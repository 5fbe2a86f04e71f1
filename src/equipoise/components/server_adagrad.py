"""The server moves by Adagrad on the sites' mean change: its running square only grows (FedAdagrad)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.components._server_steps import AdaptiveStep, StepComponent
from equipoise.contract.component import ServerSide


class ServerAdagradServer(AdaptiveStep):
    """v <- v + change^2."""

    def squares(self, old: Tensor, new: Tensor) -> Tensor:
        return old + new


class ServerAdagrad(StepComponent):
    """Server Adagrad."""

    name: ClassVar[str] = "server-adagrad"
    paper: ClassVar[str] = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    rank: ClassVar[int] = 76
    image_by_image: ClassVar[bool] = True
    Server: ClassVar[type[ServerSide]] = ServerAdagradServer

    lr: PositiveFloat = Field(0.01, description="step size of the server")
    beta: float = Field(0.9, ge=0, lt=1, description="share of the running mean that stays")
    tau: PositiveFloat = Field(1e-3, description="added to the root of the running square")


COMPONENT = ServerAdagrad
