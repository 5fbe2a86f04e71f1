"""FedBN: norm layers stay at each site, weights and statistics; everything else is averaged.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.
"""

from __future__ import annotations

from typing import ClassVar

from equipoise.components._personal import PartialClient, PartialNet
from equipoise.components.averaging import FedAvgServer
from equipoise.contract.method import Method


class FedBNNet(PartialNet):
    """Norm layers stay, weights and statistics."""

    stays = ("norm", "statistics")


class FedBNServer(FedBNNet, FedAvgServer):
    """Averages all but the norm layers."""


class FedBNClient(FedBNNet, PartialClient):
    """Trains the whole net; its norm layers go on from round to round.

    A site that has not trained yet, in round 0 or under partial participation, is measured with norm layers as they
    were first drawn or loaded: statistics of its own come only of training, as in the paper, where all sites train.
    """

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": PartialClient.discloses["train"]
        | {"model": "the net's weights outside norm layers after local training"}
    }


METHOD = Method(
    server=FedBNServer,
    client=FedBNClient,
    paper="Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021",
    year=2021,
    changes="personalisation (norm layers)",
)
