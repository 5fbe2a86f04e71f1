"""FedNova: FedAvg that divides what each site sends by the number of its local steps before it averages.

Wang, Liu, Liang, Joshi and Poor, Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.normalised_steps import NormalisedSteps
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """The method has no options."""

    def components(self) -> Sequence[Component]:
        return [NormalisedSteps()]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=(
        "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, "
        "NeurIPS 2020"
    ),
    year=2020,
    changes="aggregation (by local steps)",
    options=Options,
)
