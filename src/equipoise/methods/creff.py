"""CReFF: FedAvg whose server trains the classifier again, on equally many "federated features" of each class. They are
fitted to the classifier's gradients from the sites' real features.

Shang, Lu, Huang and Wang, Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-training with
Federated Features, IJCAI 2022. Called CReRF in FedNPR's tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.retrained_head import RetrainedHead, Retraining
from equipoise.contract.component import Component
from equipoise.contract.method import Method


class Options(Retraining):
    """CReFF's work on the server; the defaults are the released ones, and neither FedIIC nor FedNPR states others."""

    at_little_cost: ClassVar[tuple[str, ...]] = ("creff.feature_steps=3", "creff.classifier_epochs=3")

    def components(self) -> Sequence[Component]:
        return [RetrainedHead(**self.model_dump())]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=(
        "Shang et al., Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-training with "
        "Federated Features, IJCAI 2022"
    ),
    year=2022,
    changes="server step (classifier trained again on federated features)",
    options=Options,
)
