"""CLIMB: no site's loss may exceed the mean loss by more than epsilon. A dual variable per site, which grows while its
loss does, sets how much the site counts in the average; no class counts are needed.

Shen et al., An Agnostic Approach to Federated Learning with Class Imbalance, ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.duals import DualAscent, Duals
from equipoise.contract.component import Component
from equipoise.contract.method import Method


class Options(DualAscent):
    """CLIMB's dual ascent. eta_d and epsilon are those of scripts that its authors released beside their main code.

    The main code has 1 for both and stops dual variables at 100. There a site's weight may fall below 0; here it stops
    at 0.
    """

    in_short: ClassVar[tuple[str, ...]] = ("climb.primal_rounds=1",)

    def components(self) -> Sequence[Component]:
        return [Duals(**self.model_dump())]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Shen et al., An Agnostic Approach to Federated Learning with Class Imbalance, ICLR 2022",
    year=2022,
    changes="aggregation (dual variables)",
    options=Options,
)
