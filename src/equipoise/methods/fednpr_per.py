"""FedNPR-Per: FedNPR with a classifier of its own at each site; only the feature extractor is averaged.

Wicaksana, Yan and Cheng, Non-parametric Regularization for Class Imbalance Federated Medical Image
Classification, 2024 (arXiv 2407.12446), section III-E.
"""

from __future__ import annotations

from typing import ClassVar

from equipoise.engine.contract import Method
from equipoise.methods._personal import PartialClient, PartialServer
from equipoise.methods.fednpr import DEFAULTS, PAPER


class FedNPRPerServer(PartialServer):
    """Averages the feature extractor, its batch-norm statistics included (Eq. 7)."""

    stays = ("head",)


class FedNPRPerClient(PartialClient):
    """Keeps its classifier from round to round; NPR and the balanced softmax come from the method's defaults."""

    stays = ("head",)
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
