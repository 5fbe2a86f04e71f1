"""FedDyn: each site's loss gets a linear and a quadratic term that change from round to round. Local and global optima
then agree. The server corrects the mean by the sites' drift so far.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.dynamic import Dynamic
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """FedDyn's one number; its paper tunes it among 0.001, 0.01 and 0.1.

    As in the released code, gradients are clipped at 10 and weights decay by 0.001 unless train.optimiser says
    otherwise.
    """

    alpha: float = Field(
        0.01, ge=0, description="weight of the dynamic terms (FedBM: 0.01); 0: without them and the correction, FedAvg"
    )

    def components(self) -> Sequence[Component]:
        return [Dynamic(alpha=self.alpha)] if self.alpha else []


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021",
    year=2021,
    changes="loss (dynamic terms), server step",
    options=Options,
    # As released: without them the weights grow from round to round.
    defaults={"train": {"optimiser": {"clip": 10.0, "weight_decay": 1e-3}}},
)
