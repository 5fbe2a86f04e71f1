"""CCVR: FedAvg whose classifier the server calibrates at the end, on features drawn from a Gaussian of each class.

Luo, Chen, Hu, Zhang, Liang and Feng, No Fear of Heterogeneity: Classifier Calibration for Federated Learning with
Non-IID Data, NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.virtual_features import Calibration, VirtualFeatures
from equipoise.contract.component import Component
from equipoise.contract.method import Method


class Options(Calibration):
    """The virtual features and the classifier's training."""

    at_little_cost: ClassVar[tuple[str, ...]] = ("ccvr.epochs=2", "ccvr.features=20")

    def components(self) -> Sequence[Component]:
        return [VirtualFeatures(**self.model_dump())]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Luo et al., No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data, "
    "NeurIPS 2021",
    year=2021,
    changes="server step (classifier trained on virtual features)",
    options=Options,
)
