"""FedProx: FedAvg in which a proximal term keeps sites near the global model, mu/2 |w - w_global|^2.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020. The part of the paper that lets slow sites
train less needs nothing here: any number of local steps is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.prox import Prox
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """FedProx's one number; its paper tunes it among 0.001, 0.01, 0.1 and 1."""

    mu: float = Field(0.01, ge=0, description="weight of the proximal term (FedIIC: 0.01, FedBM: 0.001); 0: FedAvg")

    def components(self) -> Sequence[Component]:
        return [Prox(mu=self.mu)] if self.mu else []


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
    year=2020,
    changes="loss (proximal term)",
    options=Options,
)
