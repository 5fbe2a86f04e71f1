"""BalanceFL: a site trains as if it had all classes in equal numbers. It draws its classes equally often, adds noise to
the features of rare ones, and keeps predictions uncertain. For classes that it lacks, it distils the received model.

Shuai et al., BalanceFL: Addressing Class Imbalance in Long-Tail Federated Learning, IPSN 2022. Where the paper leaves a
choice, the released code decides. But a site's classes come from its data, not from a batch, and the teacher stays in
eval mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.components._merging import class_means, class_sums
from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.balanced_draws import BalancedDraws
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Batch, Method, PerBatch
from equipoise.contract.modules import copy_entries
from equipoise.contract.protocol import Action, Payload, Scan, Tensors
from equipoise.losses import inherited_knowledge, prediction_entropy


class Options(MethodOptions):
    """The parts of the local self-balancing scheme, with the released weights. All off: FedAvg."""

    balanced: bool = Field(True, description="draw every class of the site equally often")
    feature_noise: bool = Field(True, description="add noise to features, more often for rare classes")
    present_only: bool = Field(True, description="the supervised loss compares only the classes that the site has")
    inherit: float = Field(
        1.0, ge=0, description="weight of the distillation from the received model on classes that the site lacks"
    )
    temperature: PositiveFloat = Field(2.0, description="temperature of that word")
    smooth: float = Field(0.002, ge=0, description="weight of the entropy of predictions, summed over a batch")

    def components(self) -> Sequence[Component]:
        return [BalancedDraws()] if self.balanced else []

    def needs(self) -> AbstractSet[str]:
        return {"image labels"}

    def lacks(self) -> AbstractSet[str]:
        found = {"plain forward", "plain loss"}
        if self.present_only:
            found |= {"all classes"} if self.inherit else {"all classes", "absent classes"}
        return found


class BalanceFLClient(FedAvgClient):
    """Trains the received net by knowledge inheritance and inter-class balancing."""

    #: what draws the noise on features in this ask
    noise: torch.Generator | None = None

    def build(self) -> None:
        super().build()
        if self.options.inherit:
            self.teacher = self.reference(self.new_net())
            self.scratch("teacher", self.teacher)
        if self.options.feature_noise:
            size = self.net.feature_size
            self.spread = self.scratch("spread", torch.zeros(size, size))

    def train(self, message: Payload) -> Action:
        if self.options.inherit:
            copy_entries(self.net, self.teacher)
        if self.options.feature_noise:
            seen = yield Scan("train", self.sample, reduce="concatenate")
            spread = within_class_spread(seen["features"], seen["labels"], self.num_classes)
            self.spread[: len(spread)].copy_(spread)
            self.noise = self.random("feature noise")
        return (yield from super().train(message))

    def sample(self, batch: Batch) -> Tensors:
        """Features (B, D) of a batch under the received net, and its labels (B,)."""
        return {"features": self.outputs(batch).features, "labels": batch.label}

    # ---- outside the step --------------------------------------------------------------------------

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        """The received model's logits (n, C) and the noise on features (n, D)."""
        fields: dict[str, Tensor | PerBatch] = {}
        if self.options.inherit:
            fields["inherited"] = self.teacher_logits(chunk.image)
        if self.noise is not None:
            fields["noise"] = self.feature_noise(chunk.label, self.noise)
        return fields

    def teacher_logits(self, images: Tensor) -> Tensor:
        """Logits (n, C) of the received model, in the configured precision."""
        with self.workplace.precision():
            parts = images.split(self.setting.config.evaluation.batch_size)
            return torch.cat([self.teacher(some) for some in parts]).float()

    def feature_noise(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Noise (n, D) that spreads as features do within classes, for 1 - n_c / n_max of the images of class c."""
        draws = torch.randn(len(labels), len(self.spread), generator=generator, device=labels.device)
        chance = 1 - self.class_counts / self.class_counts.max()
        noisy = torch.rand(len(labels), generator=generator, device=labels.device) < chance[labels]
        return noisy[:, None] * (draws @ self.spread)

    # ---- the step ----------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Any:
        """Features (B, D) and logits (B, C); in training also the logits of the features with noise."""
        out = super().forward(batch)
        if hasattr(batch, "noise"):
            out.noisy_logits = self.net.classify(out.features + batch.noise)
        return out

    def loss(self, batch: Batch, out: Any) -> Tensor:
        """Supervised loss + inherit * inherited knowledge - smooth * entropy."""
        options, present = self.options, self.class_counts > 0
        logits = out.noisy_logits if options.feature_noise else out.logits
        if options.present_only:
            logits = logits.masked_fill(~present, torch.finfo(logits.dtype).min)
        loss = self.supervised(logits, batch.label)
        if options.inherit:
            knowledge = inherited_knowledge(out.logits, batch.inherited, ~present, options.temperature)
            loss = loss + options.inherit * knowledge
        if options.smooth:
            loss = loss - options.smooth * prediction_entropy(out.logits, present).sum()
        return loss


def within_class_spread(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """A matrix R (min(n, D), D) such that R^T R is the covariance of features (n, D) within their classes.

    The mean of the classes' unbiased covariances, each weighed by its number of samples; a class with one has none.
    """
    found = class_sums(features, labels, num_classes)
    counts = found["counts"]
    deviations = features - class_means(found["sums"], counts)[labels]
    weights = counts / ((counts - 1).clamp(min=1) * counts.sum())
    return torch.linalg.qr(deviations * weights.sqrt()[labels][:, None], mode="r")[1]


METHOD = Method(
    server=FedAvgServer,
    client=BalanceFLClient,
    paper="Shuai et al., BalanceFL: Addressing Class Imbalance in Long-Tail Federated Learning, IPSN 2022",
    year=2022,
    changes="loss (inheritance, entropy, noise on features), balanced draws at the sites",
    options=Options,
)
