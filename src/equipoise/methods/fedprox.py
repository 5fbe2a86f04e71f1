"""FedProx: FedAvg whose sites are held to the global model by a proximal term, mu/2 |w - w_global|^2.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020. The part of the paper that lets slow sites
train less needs nothing here: any number of local steps is averaged.
"""

from __future__ import annotations

from pydantic import Field

from equipoise.components._drift import AnchoredClient
from equipoise.components.averaging import FedAvgServer
from equipoise.contract.config import Table
from equipoise.contract.method import Method


class Options(Table):
    """FedProx's one number; its paper tunes it among 0.001, 0.01, 0.1 and 1."""

    mu: float = Field(0.01, ge=0, description="weight of the proximal term (FedIIC: 0.01, FedBM: 0.001); 0: FedAvg")


class FedProxClient(AnchoredClient):
    """Trains near the received net."""

    @property
    def pull(self) -> float:
        return self.options.mu


METHOD = Method(
    server=FedAvgServer,
    client=FedProxClient,
    paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
    year=2020,
    changes="loss (proximal term)",
    options=Options,
)
