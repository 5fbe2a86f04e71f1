"""FedeAMC: FedAvg with a balanced cross entropy, in which a site's classes count alike however many images they have.

Wang et al., Federated Learning for Automatic Modulation Classification Under Class Imbalance and Varying Noise
Condition, IEEE Transactions on Cognitive Communications and Networking 8(1), 2022.
"""

from __future__ import annotations

from torch import Tensor

from equipoise.engine.contract import Method
from equipoise.losses import class_balanced
from equipoise.methods.fedavg import FedAvgClient, FedAvgServer


class FedeAMCServer(FedAvgServer):
    """Averages as FedAvg does."""


class FedeAMCClient(FedAvgClient):
    """Trains by the balanced cross entropy, which takes the place of train.loss."""

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        return class_balanced(logits, labels, self.class_counts)


METHOD = Method(
    server=FedeAMCServer,
    client=FedeAMCClient,
    paper=(
        "Wang et al., Federated Learning for Automatic Modulation Classification Under Class Imbalance and Varying "
        "Noise Condition, IEEE TCCN 2022"
    ),
    year=2022,
    changes="loss (class weights)",
)
