"""The server trains the classifier again on features drawn from a Gaussian of each class (CCVR).

After training, sites send for each class the number, sum and Gram matrix of its features under the common model. These
give the mean and covariance of the pooled images. The paper's power transform of features is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from equipoise.closed_form import LEAST_VARIANCE, packed, unpacked
from equipoise.components._closed_form import total_of
from equipoise.components._gradient_matching import with_constant
from equipoise.components._merging import shuffled_batches
from equipoise.components.retrained_head import packed as packed_head
from equipoise.components.retrained_head import unpacked as unpacked_head
from equipoise.contract.component import Batch, Component, Options, ServerSide, Sheet, SiteSide
from equipoise.contract.disclosed import Entry
from equipoise.contract.protocol import Action, Conversation, Payload, Scan, Tensors
from equipoise.contract.summed import added
from equipoise.losses import membership


def gaussian_of(number: float, total: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (D,) and the symmetric root R (D, D) of the covariance R R of some features: over n - 1, as in the paper.

    The root changes as little as the covariance does. Directions without variance are left out.
    """
    mean = total / number
    covariance = (gram - number * torch.outer(mean, mean)) / max(number - 1, 1)
    variances, directions = torch.linalg.eigh(covariance)
    variances = torch.where(variances > LEAST_VARIANCE * variances[-1].clamp(min=0), variances, 0.0)
    return mean, (directions * variances.sqrt()) @ directions.T


def calibrated(
    classifier: Tensor, features: Tensor, known: Tensor, epochs: int, batch: int, rate: float, random: torch.Generator
) -> Tensor:
    """The classifier (C, D or D + 1), trained on by plain SGD on features (C, M, D) of the classes of a mask (C,)."""
    labels = torch.arange(len(known), device=known.device)[known].repeat_interleave(features.shape[1])
    inputs, found = with_constant(features[known].flatten(0, 1), classifier), classifier.clone()
    members = membership(labels, len(known), inputs.dtype)
    for rows in shuffled_batches(len(inputs), batch, epochs, random):
        residuals = (inputs[rows] @ found.T).softmax(1) - members[rows]
        found.addmm_(residuals.T, inputs[rows], alpha=-rate / len(rows))
    return found


class VirtualFeaturesServer(ServerSide):
    """Draws features and trains the head on them."""

    def setup(self) -> None:
        self.state.classifier = packed_head(self.server.state.model)
        self.state.retrained = 0

    def finish(self, number: int, sites: Sequence[str]) -> Conversation:
        if self.options.when == "end" and number != self.setting.config.train.rounds:
            return
        found = self.values((yield self.ask("moments", sites, **self.server.received(sites))), "gram")
        counts, sums, grams = (total_of(found, name) for name in ("class_counts", "by_class", "gram"))
        classifier = packed_head(self.server.state.model)
        features = self.drawn(number, counts, sums, grams)
        random, options = self.random("classifier", number), self.options
        self.state.classifier = calibrated(
            classifier, features, counts > 0, options.epochs, options.batch, options.lr, random
        )
        self.state.retrained = 1

    def drawn(self, number: int, counts: Tensor, sums: Tensor, grams: Tensor) -> Tensor:
        """As many features of each class (C, M, D), from its Gaussian; zeros for a class that no site has."""
        random, shape = self.random("features", number), (self.options.features, sums.shape[1])
        found = torch.zeros(len(counts), *shape, dtype=torch.float64, device=sums.device)
        for place, count in enumerate(counts.tolist()):
            noise = torch.randn(shape, generator=random, dtype=torch.float64, device=sums.device)
            if count:
                mean, root = gaussian_of(count, sums[place], unpacked(grams[place]))
                found[place] = mean + noise @ root.T
        return found.float()

    def shown(self, model: Tensors) -> Tensors:
        """The averaged body under the classifier trained on virtual features."""
        return model | unpacked_head(self.state.classifier, model) if self.state.retrained else model


class VirtualFeaturesSite(SiteSide):
    """Tells where the features of each class lie."""

    def moments(self, message: Payload) -> Action:
        """Number, sum and Gram matrix of the features of each class, without those below `privacy.least`."""
        found = yield Scan("train", self.by_class)
        taken = self.class_counts >= max(self.setting.config.privacy.least, 1)
        return {name: value * taken.reshape(-1, *[1] * (value.dim() - 1)) for name, value in found.items()}

    def by_class(self, batch: Batch) -> Tensors:
        """The sums over a batch, by class."""
        features = self.client.outputs(batch).features.double()
        member = membership(batch.label, self.num_classes, features.dtype)
        grams = [packed(features.T @ (features * weight[:, None])) for weight in member.T]
        return {"gram": torch.stack(grams), "by_class": member.T @ features, "class_counts": member.sum(0)}


class Calibration(Options):
    """The virtual features and the classifier's training."""

    features: PositiveInt = Field(100, description="virtual features of each class (the paper's M_c for CIFAR-10)")
    epochs: PositiveInt = Field(10, description="passes over them that train the classifier")
    lr: PositiveFloat = Field(0.01, description="learning rate of the classifier")
    batch: PositiveInt = Field(32, description="features in each step of the classifier")
    when: Literal["end", "round"] = Field("end", description="after the last round (the paper), or after each")


class VirtualFeatures(Calibration, Component):
    """Classifier calibration with virtual representations."""

    name: ClassVar[str] = "virtual-features"
    paper: ClassVar[str] = "Luo et al., CCVR, NeurIPS 2021"
    rank: ClassVar[int] = 81
    at_little_cost: ClassVar[tuple[str, ...]] = ("virtual-features.epochs=2", "virtual-features.features=20")
    Site: ClassVar[type[SiteSide]] = VirtualFeaturesSite
    Server: ClassVar[type[ServerSide]] = VirtualFeaturesServer

    def lacks(self) -> AbstractSet[str]:
        return {"head predicts"}

    def needs(self) -> AbstractSet[str]:
        return {
            "model",
            "whole model",
            "class head",
            "head predicts",
            "one model",
            "net trains",
            "plain features",
            "pooled features",
            "sites",
        }

    def discloses(self) -> Sheet:
        text = "of each class's features under the common model; of a class with one image, that image's"
        return {
            "moments": {
                "gram": added(Entry(f"Gram matrix {text}")),
                "by_class": added(Entry(f"sum {text}")),
                "class_counts": added(Entry("number of local training images of each class", "counts")),
            }
        }


COMPONENT = VirtualFeatures
