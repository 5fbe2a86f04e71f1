"""FedNPR-Per: FedNPR with a classifier of its own at each site; only the feature extractor is averaged.

Wicaksana, Yan and Cheng, Non-parametric Regularization for Class Imbalance Federated Medical Image
Classification, 2024 (arXiv 2407.12446), section III-E.
"""

from __future__ import annotations

from typing import ClassVar

from equipoise.components._personal import PartialClient, PartialNet
from equipoise.components.averaging import FedAvgServer
from equipoise.contract.method import Method
from equipoise.methods.fednpr import DEFAULTS, PAPER


class FedNPRPerNet(PartialNet):
    """The classifier stays."""

    stays = ("head",)


class FedNPRPerServer(FedNPRPerNet, FedAvgServer):
    """Averages the feature extractor, its batch-norm statistics included (Eq. 7)."""


class FedNPRPerClient(FedNPRPerNet, PartialClient):
    """Keeps its classifier from round to round; NPR and the balanced softmax come from the method's defaults."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": PartialClient.discloses["train"]
        | {"model": "the feature extractor's weights and batch-norm statistics after local training"}
    }


METHOD = Method(
    server=FedNPRPerServer,
    client=FedNPRPerClient,
    paper=PAPER,
    year=2024,
    changes="loss (balanced softmax, sub-cluster prototypes), personal classifier",
    defaults=DEFAULTS,
)
