"""FedNPR-Per: FedNPR with a classifier of its own at each site; only the feature extractor is averaged.

Wicaksana, Yan and Cheng, Non-parametric Regularization for Class Imbalance Federated Medical Image
Classification, 2024 (arXiv 2407.12446), section III-E.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import nn

from equipoise.engine.contract import Method
from equipoise.methods.fednpr import DEFAULTS, PAPER, FedNPRClient, FedNPRServer
from equipoise.nets import groups


def extractor(net: nn.Module) -> Iterable[str]:
    """The state-dict names of all but the classifier, batch-norm statistics included."""
    head = set(groups(net)["head"])
    return [entry for entry in net.state_dict() if entry not in head]


class FedNPRPerServer(FedNPRServer):
    """Averages the feature extractor (Eq. 7)."""

    def shared_entries(self, net: nn.Module) -> Iterable[str]:
        return extractor(net)


class FedNPRPerClient(FedNPRClient):
    """Keeps its classifier from round to round; only the feature extractor is received and sent."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": {
            "model": "the feature extractor's weights and batch-norm statistics after local training",
            "examples": "number of local training images",
        }
    }
    views = ("personal",)

    def build(self) -> None:
        super().build()
        self.keeps("head", self.net, self.entries(self.net, "head"))

    def shared_entries(self, net: nn.Module) -> Iterable[str]:
        return extractor(net)


METHOD = Method(
    server=FedNPRPerServer,
    client=FedNPRPerClient,
    paper=PAPER,
    year=2024,
    changes="loss (balanced softmax, sub-cluster prototypes), personal classifier",
    defaults=DEFAULTS,
)
