"""FedNPR-Per: FedNPR with a personal classifier at each site; only the feature extractor is averaged.

Wicaksana, Yan and Cheng, Non-parametric Regularization for Class Imbalance Federated Medical Image
Classification, 2024 (arXiv 2407.12446), section III-E.
"""

from collections.abc import Sequence

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.personal_head import PersonalHead
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method
from equipoise.methods.fednpr import DEFAULTS, PAPER


class Options(MethodOptions):
    """The method has no options."""

    def components(self) -> Sequence[Component]:
        return [PersonalHead()]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=PAPER,
    year=2024,
    changes="loss (balanced softmax, sub-cluster prototypes), personal classifier",
    defaults=DEFAULTS,
    options=Options,
    names={"stays": "personal"},
)
