"""FedeAMC: FedAvg with a balanced cross entropy, in which a site's classes count alike however many images they have.

Wang et al., Federated Learning for Automatic Modulation Classification Under Class Imbalance and Varying Noise
Condition, IEEE Transactions on Cognitive Communications and Networking 8(1), 2022.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.config import Table
from equipoise.contract.method import Method, Setting
from equipoise.losses import class_balanced


class Options(Table):
    """How far the loss goes in balancing classes."""

    power: float = Field(
        1.0, ge=0, le=1, description="images weigh by their class's count to this power, inversely; 0: FedAvg"
    )


class FedeAMCClient(FedAvgClient):
    """Trains by the balanced cross entropy, which takes the place of train.loss unless its power is 0."""

    @classmethod
    def ignores(cls, setting: Setting) -> tuple[str, ...]:
        return ("train.loss",) if setting.options.power else ()

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        if not self.options.power:
            return super().supervised(logits, labels)
        return class_balanced(logits, labels, self.class_counts, self.options.power)


METHOD = Method(
    server=FedAvgServer,
    client=FedeAMCClient,
    paper=(
        "Wang et al., Federated Learning for Automatic Modulation Classification Under Class Imbalance and Varying "
        "Noise Condition, IEEE TCCN 2022"
    ),
    year=2022,
    changes="loss (class weights)",
    options=Options,
)
