"""FedeAMC: FedAvg with a balanced cross entropy, in which a site's classes count alike however many images they have.

Wang et al., Federated Learning for Automatic Modulation Classification Under Class Imbalance and Varying Noise
Condition, IEEE Transactions on Cognitive Communications and Networking 8(1), 2022.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.class_balanced import ClassBalanced
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """How far the loss goes in balancing classes."""

    power: float = Field(
        1.0, ge=0, le=1, description="images weigh by their class's count to this power, inversely; 0: FedAvg"
    )

    def components(self) -> Sequence[Component]:
        return [ClassBalanced(power=self.power)] if self.power else []


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=(
        "Wang et al., Federated Learning for Automatic Modulation Classification Under Class Imbalance and Varying "
        "Noise Condition, IEEE TCCN 2022"
    ),
    year=2022,
    changes="loss (class weights)",
    options=Options,
)
