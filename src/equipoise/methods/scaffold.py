"""SCAFFOLD: control variates at each site and on the server estimate the directions of local and global updates. Their
difference corrects local steps.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, PositiveFloat

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.control_variates import ControlVariates
from equipoise.components.server_momentum import ServerMomentum
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """SCAFFOLD's global step. The local one, eta_l, is train.optimiser.lr."""

    server_lr: PositiveFloat = Field(1.0, description="eta_g: how far the global model goes to the sites' mean")

    def components(self) -> Sequence[Component]:
        found: list[Component] = [ControlVariates()]
        if self.server_lr != 1:
            found.append(ServerMomentum(lr=self.server_lr, momentum=0.0))
        return found


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
    year=2020,
    changes="local step (control variates), server step",
    options=Options,
)
