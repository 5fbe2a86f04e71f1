"""CReFF: FedAvg whose server trains the classifier again, on equally many "federated features" of each class. They are
fitted to the classifier's gradients from the sites' real features.

Shang, Lu, Huang and Wang, Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-training with
Federated Features, IJCAI 2022. Called CReRF in FedNPR's tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.retrained_head import RetrainedHead
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """CReFF's work on the server; the defaults are the released ones, and neither FedIIC nor FedNPR states others."""

    at_little_cost: ClassVar[tuple[str, ...]] = ("creff.feature_steps=3", "creff.classifier_epochs=3")

    features: PositiveInt = Field(100, description="federated features of each class")
    feature_steps: int = Field(100, ge=0, description="gradient steps a round that fit them; 0: they stay random")
    feature_lr: PositiveFloat = Field(0.1, description="their learning rate")
    classifier_epochs: int = Field(
        300, ge=0, description="passes a round over the features that train the classifier again; 0: plain FedAvg"
    )
    classifier_lr: PositiveFloat = Field(0.01, description="their learning rate")
    classifier_batch: PositiveInt = Field(32, description="features in each of their steps")

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
