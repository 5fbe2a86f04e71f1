"""Fed-GraB: binary cross entropy of each class, whose gradients a controller at each site balances for rare classes.

Xiao, Chen, Liu, Wang, Feng, Hao, Zhou, Wu, Yang and Liu, Fed-GraB: Federated Long-tailed Learning with Self-Adjusting
Gradient Balancer, NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.gradient_balance import GradientBalance
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """The controllers; the released gains."""

    kp: float = Field(10.0, ge=0, description="proportional gain")
    ki: float = Field(0.01, ge=0, description="integral gain")
    kd: float = Field(0.1, ge=0, description="derivative gain")
    classes: Literal["rare", "all"] = Field("rare", description="classes with a controller")
    share: float = Field(0.5, gt=0, le=1, description="share of the classes that count as rare")

    def components(self) -> Sequence[Component]:
        return [GradientBalance(**self.model_dump())]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Xiao et al., Fed-GraB: Federated Long-tailed Learning with Self-Adjusting Gradient Balancer, NeurIPS 2023",
    year=2023,
    changes="loss (binary cross entropy with balanced gradients)",
    options=Options,
)
