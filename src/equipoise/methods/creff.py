"""CReFF: FedAvg whose classifier is trained again on the server, on as many made-up "federated features" of each class,
which are fitted to the gradients that the sites' real features give the classifier.

Shang, Lu, Huang and Wang, Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-training with
Federated Features, IJCAI 2022. Called CReRF in FedNPR's tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from equipoise.components._gradient_matching import FeatureFitting, gradient_sums
from equipoise.components._merging import average, class_means, mean_by_class
from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.config import Table
from equipoise.contract.method import Batch, Method
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, PerSite, Scan, Tensors, Value


class Options(Table):
    """CReFF's work on the server; the defaults are the released ones, and neither FedIIC nor FedNPR states others."""

    features: PositiveInt = Field(100, description="federated features of each class")
    feature_steps: int = Field(100, ge=0, description="gradient steps a round that fit them; 0: they stay random")
    feature_lr: PositiveFloat = Field(0.1, description="their learning rate")
    classifier_epochs: int = Field(
        300, ge=0, description="passes a round over the features that train the classifier again; 0: plain FedAvg"
    )
    classifier_lr: PositiveFloat = Field(0.01, description="their learning rate")
    classifier_batch: PositiveInt = Field(32, description="features in each of their steps")


class CReFFServer(FedAvgServer):
    """Goes on with FedAvg underneath; keeps federated features, and the classifier that it last trained on them."""

    def setup(self) -> None:
        super().setup()
        self.state.classifier = packed(self.state.model)
        num_classes, size = self.state.model["head.weight"].shape
        self.state.features = torch.randn(
            num_classes,
            self.options.features,
            size,
            generator=self.random("features", 0),
            device=self.setting.device,
        )
        options = self.options
        self.fitting = FeatureFitting(
            self.state.features,
            self.state.classifier,
            options.feature_lr,
            options.classifier_lr,
            options.classifier_batch,
            self.setting.config.compute.capture,
        )

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        state, options = self.state, self.options
        updates = yield Ask("train", sites, model=state.model, classifier=state.classifier)
        state.model = average(updates, "model", self.setting.config.train.aggregation)
        targets, known = mean_by_class(updates, "gradients", "uniform", by="present")
        state.features = self.fitting.match(state.features, state.classifier, targets, known, options.feature_steps)
        state.classifier = packed(state.model)
        if options.classifier_epochs:
            random = self.random("classifier", number)
            state.classifier = self.fitting.retrain(state.features, options.classifier_epochs, random)

    def message(self) -> dict[str, Value | PerSite]:
        """The averaged body under the classifier trained on federated features: what CReFF predicts by."""
        return {"model": self.state.model | unpacked(self.state.classifier, self.state.model)}


def packed(model: Tensors) -> Tensor:
    """The head of a model as one matrix: weights (C, D), and the bias as the last column if it has one."""
    weight, bias = model["head.weight"], model.get("head.bias")
    return weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)


def unpacked(classifier: Tensor, model: Tensors) -> Tensors:
    """The head's entries of a classifier that `packed` made of a model like this one."""
    size = model["head.weight"].shape[1]
    bias = {"head.bias": classifier[:, size].contiguous()} if "head.bias" in model else {}
    return {"head.weight": classifier[:, :size].contiguous(), **bias}


class CReFFClient(FedAvgClient):
    """Tells what its features ask of the server's classifier, class by class, then trains as in FedAvg."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": {
            **FedAvgClient.discloses["train"],
            "gradients": (
                "mean gradient of the server's classifier on the local images of each class; for a class with one "
                "image it gives away that image's feature"
            ),
            "present": "which classes the site has training images of",
        }
    }

    def build(self) -> None:
        super().build()
        self.classifier = self.receives("classifier", packed(self.net.state_dict()).clone())

    def train(self, message: Payload) -> Action:
        sums = yield Scan("train", self.gradients)
        gradients = class_means(sums["gradients"], self.class_counts)
        update = yield from super().train(message)
        return {**update, "gradients": gradients, "present": self.class_counts > 0}

    def gradients(self, batch: Batch) -> Tensors:
        """Gradients (C, C, D or D + 1) of the server's classifier, by the received net's features of a batch."""
        return {"gradients": gradient_sums(self.outputs(batch).features, batch.label, self.classifier)}


METHOD = Method(
    server=CReFFServer,
    client=CReFFClient,
    paper=(
        "Shang et al., Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-training with "
        "Federated Features, IJCAI 2022"
    ),
    year=2022,
    changes="server step (classifier trained again on federated features)",
    options=Options,
)
