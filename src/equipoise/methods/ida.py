"""IDA: the nearer a site's model is to the mean of all, the more it counts, so that outliers count little.

Yeganeh et al., Inverse Distance Aggregation for Federated Learning with Non-IID Data, DCL workshop at MICCAI 2020. No
code was released. The paper's floor of the training accuracy, 1 / K, can be read as chance or by the number of sites.
"""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.inverse_distance import Factors, InverseDistance
from equipoise.contract.component import Component
from equipoise.contract.method import Method


class Options(Factors):
    """Factors of a site's weight, multiplied. They take the place of train.aggregation."""

    def components(self) -> Sequence[Component]:
        return [InverseDistance(**self.model_dump())]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Yeganeh et al., Inverse Distance Aggregation for Federated Learning with Non-IID Data, MICCAI DCL 2020",
    year=2020,
    changes="aggregation (inverse distance to the mean)",
    options=Options,
)
