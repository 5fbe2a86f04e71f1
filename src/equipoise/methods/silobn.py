"""SiloBN: the running statistics of batch norm stay at each site; all weights are averaged, those of norm layers too.

Andreux et al., Siloed Federated Learning for Multi-Centric Histopathology Datasets, DART at MICCAI 2020.
"""

from __future__ import annotations

from typing import ClassVar

from equipoise.components._personal import PartialClient, PartialNet
from equipoise.components.averaging import FedAvgServer
from equipoise.contract.method import Method


class SiloBNNet(PartialNet):
    """Only the running statistics stay."""

    stays = ("statistics",)


class SiloBNServer(SiloBNNet, FedAvgServer):
    """Averages all weights and no statistics."""


class SiloBNClient(SiloBNNet, PartialClient):
    """Trains the received weights; its statistics go on from round to round.

    A site that has not trained yet, in round 0 or under partial participation, is measured with the net's first
    statistics: it has none of its own.
    """

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": PartialClient.discloses["train"] | {"model": "the net's weights after local training"}
    }


METHOD = Method(
    server=SiloBNServer,
    client=SiloBNClient,
    paper="Andreux et al., Siloed Federated Learning for Multi-Centric Histopathology Datasets, DART at MICCAI 2020",
    year=2020,
    changes="personalisation (batch-norm statistics)",
)
