"""FedBN: norm layers stay at each site, weights and statistics; everything else is averaged.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.
"""

from collections.abc import Sequence

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.local_norm import LocalNorm
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """The method has no options."""

    def components(self) -> Sequence[Component]:
        return [LocalNorm()]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021",
    year=2021,
    changes="personalisation (norm layers)",
    options=Options,
    names={"stays": "personal"},
)
