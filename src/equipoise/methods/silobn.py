"""SiloBN: the running statistics of batch norm stay at each site; all weights are averaged, those of norm layers too.

Andreux et al., Siloed Federated Learning for Multi-Centric Histopathology Datasets, DART at MICCAI 2020.
"""

from collections.abc import Sequence

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.local_statistics import LocalStatistics
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """The method has no options."""

    def components(self) -> Sequence[Component]:
        return [LocalStatistics()]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Andreux et al., Siloed Federated Learning for Multi-Centric Histopathology Datasets, DART at MICCAI 2020",
    year=2020,
    changes="personalisation (batch-norm statistics)",
    options=Options,
    names={"stays": "personal"},
)
