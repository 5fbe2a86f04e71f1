"""The server trains the classifier again on made-up "federated features", as many of each class (CReFF).

These are fitted to the gradients that the sites' real features give the classifier.

The sites train on the plain mean; what is evaluated has the retrained classifier.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from equipoise.components._gradient_matching import FeatureFitting, gradient_sums
from equipoise.components._merging import class_means, mean_by_class
from equipoise.contract.component import Batch, Component, Message, Options, ServerSide, Sheet, SiteSide
from equipoise.contract.disclosed import Entry
from equipoise.contract.protocol import Payload, Replies, Scan, Tensors, Work
from equipoise.contract.summed import added, averaged_by_class


def packed(model: Tensors) -> Tensor:
    """The head of a model as one matrix: weights (C, D), and the bias as the last column if it has one."""
    weight, bias = model["head.weight"], model.get("head.bias")
    return weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)


def unpacked(classifier: Tensor, model: Tensors) -> Tensors:
    """The head's entries of a classifier that `packed` made of a model like this one."""
    size = model["head.weight"].shape[1]
    bias = {"head.bias": classifier[:, size].contiguous()} if "head.bias" in model else {}
    return {"head.weight": classifier[:, :size].contiguous(), **bias}


class RetrainedHeadServer(ServerSide):
    """Keeps federated features, and the classifier that it last trained on them."""

    def setup(self) -> None:
        options, state = self.options, self.state
        state.classifier = packed(self.server.state.model)
        num_classes, size = self.server.state.model["head.weight"].shape
        state.features = torch.randn(
            num_classes, options.features, size, generator=self.random("features", 0), device=self.setting.device
        )
        self.fitting = FeatureFitting(
            state.features,
            state.classifier,
            options.feature_lr,
            options.classifier_lr,
            options.classifier_batch,
            self.setting.config.compute.capture,
        )

    def message(self, number: int) -> Message:
        return {"classifier": self.state.classifier}

    def after(self, number: int, updates: Replies, before: Tensors, model: Tensors) -> Tensors:
        state, options = self.state, self.options
        targets, known = mean_by_class(updates, "gradients", "uniform", by="present")
        state.features = self.fitting.match(state.features, state.classifier, targets, known, options.feature_steps)
        state.classifier = packed(model)
        if options.classifier_epochs:
            random = self.random("classifier", number)
            state.classifier = self.fitting.retrain(state.features, options.classifier_epochs, random)
        return model

    def shown(self, model: Tensors) -> Tensors:
        """The averaged body under the classifier trained on federated features."""
        return model | unpacked(self.state.classifier, model)


class RetrainedHeadSite(SiteSide):
    """Tells what its features ask of the server's classifier, class by class, before it trains."""

    def build(self) -> None:
        self.classifier = self.receives("classifier", packed(self.client.net.state_dict()).clone())

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        sums = yield Scan("train", self.gradients)
        self.mean_gradients = class_means(sums["gradients"], self.class_counts)

    def reply(self) -> Generator[Work, Any, Payload]:
        yield from ()
        return {"gradients": self.mean_gradients, "present": self.class_counts > 0}

    def begin_adapting(self) -> Generator[Work, Any, None]:
        """Fine-tuning needs nothing of the server's classifier."""
        yield from ()

    def gradients(self, batch: Batch) -> Tensors:
        """Gradients (C, C, D or D + 1) of the server's classifier, by the received net's features of a batch."""
        features = self.client.outputs(batch).features
        return {"gradients": gradient_sums(features, batch.label, self.classifier)}


class Retraining(Options):
    """How the server trains the classifier again; the defaults are the released ones."""

    features: PositiveInt = Field(100, description="federated features of each class")
    feature_steps: int = Field(100, ge=0, description="gradient steps a round that fit them; 0: they stay random")
    feature_lr: PositiveFloat = Field(0.1, description="learning rate of these steps")
    classifier_epochs: int = Field(
        300, ge=0, description="passes a round over the features that train the classifier again; 0: plain FedAvg"
    )
    classifier_lr: PositiveFloat = Field(0.01, description="learning rate of the classifier")
    classifier_batch: PositiveInt = Field(32, description="features in each step of the classifier")


class RetrainedHead(Retraining, Component):
    """Classifier re-training with federated features; the defaults are the released ones."""

    name: ClassVar[str] = "retrained-head"
    paper: ClassVar[str] = "Shang et al., CReFF, IJCAI 2022"
    rank: ClassVar[int] = 80
    limit: ClassVar[Mapping[str, Any]] = {"classifier_epochs": 0}
    at_little_cost: ClassVar[tuple[str, ...]] = ("retrained-head.feature_steps=3", "retrained-head.classifier_epochs=3")
    Site: ClassVar[type[SiteSide]] = RetrainedHeadSite
    Server: ClassVar[type[ServerSide]] = RetrainedHeadServer

    def needs(self) -> AbstractSet[str]:
        return {
            "model",
            "class head",
            "head predicts",
            "one model",
            "plain features",
            "one training ask",
            "sites",
            "pooled features",
        }

    def discloses(self) -> Sheet:
        return {
            "train": {
                "gradients": averaged_by_class(
                    Entry(
                        "mean gradient of the server's classifier on the local images of each class; for a class with "
                        "one image it gives away that image's feature"
                    ),
                    by="present",
                    weighting="uniform",
                ),
                "present": added(Entry("which classes the site has training images of")),
            }
        }


COMPONENT = RetrainedHead
