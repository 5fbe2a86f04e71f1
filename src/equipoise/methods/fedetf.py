"""FedETF: all sites train under one fixed classifier, an equiangular tight frame (ETF) with maximally separated class
vectors. Features pass a projection, and local class counts balance the loss. A site makes
its personal model by fine-tuning simplex and projection in turns.

Li, Shang, He, Lin and Wu, No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and
Fixed Classifier, ICCV 2023.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from equipoise.components._cosine import CosineClient, CosineServer, with_cosine_head
from equipoise.components._merging import shuffled_batches
from equipoise.components.averaging import SharedNet
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Batch, Method
from equipoise.contract.optimiser import Optimiser
from equipoise.contract.protocol import Scan, Tensors, Train, Work
from equipoise.contract.summed import averaged
from equipoise.contract.tables import OptimiserConfig
from equipoise.losses import balanced_softmax, cross_entropy
from equipoise.nets import Net
from equipoise.prototypes import simplex_frame


class Options(MethodOptions):
    """FedETF's classifier, its balanced loss (in place of train.loss) and its fine-tuning, as released."""

    size: PositiveInt | None = Field(None, description="projected features; by default as many as classes, the fewest")
    gamma: float = Field(1.0, ge=0, description="exponent of the class counts in the balanced loss; 0: cross entropy")
    scale: PositiveFloat = Field(1.0, description="beta, initial factor of cosines; it is learnt")
    finetune_epochs: int | None = Field(
        None, ge=0, description="epochs of the whole net before fine-tuning in turns; default: train.epochs"
    )
    turns: int = Field(20, ge=0, description="how often simplex and projection take turns; 0: neither is fine-tuned")
    turn_epochs: PositiveInt = Field(3, description="epochs of each in a turn")
    turn_batch: PositiveInt = Field(128, description="features in each step of a turn")
    simplex_lr: PositiveFloat = Field(0.1, description="learning rate of the simplex (SGD)")
    projection_lr: PositiveFloat = Field(0.05, description="learning rate of the projection (SGD, momentum 0.9)")

    def holds(self) -> AbstractSet[str]:
        return {"head", "loss", "merge"}

    def needs(self) -> AbstractSet[str]:
        return {"pooled features"}

    def lacks(self) -> AbstractSet[str]:
        return {"class head", "whole model", "supervised", "plain loss", "fixed personal models"}


class FedETFNet(SharedNet):
    """The net with its projection and its simplex. Where the projection is as wide as the classes, the head is it."""

    def new_net(self) -> Net:
        setting = self.setting
        net, options, num_classes = setting.new_net(), setting.options, setting.num_classes
        size = options.size or num_classes
        projection = net.head
        if size != num_classes:
            projection = setting.seeded("projection", lambda: nn.Linear(net.feature_size, size))
        simplex = setting.seeded("simplex", lambda: simplex_frame(num_classes, size))
        return with_cosine_head(net, simplex, options.scale, projection)


class FedETFServer(FedETFNet, CosineServer):
    """Averages body, projection and scale; the simplex never changes."""


class FedETFClient(FedETFNet, CosineClient):
    """Trains under the simplex, which moves only in fine-tuning, of which nothing is kept."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": {
            **CosineClient.discloses["train"],
            "model": averaged(
                "body, projection and scale of the cosines after local training, with batch-norm statistics"
            ),
        }
    }
    views = ("global", "personal")

    def loss(self, batch: Batch, out: Any) -> Tensor:
        """Balanced by local counts, in which a class that the site lacks counts as one image (as released)."""
        return balanced_softmax(out.logits, batch.label, self.class_counts.clamp(min=1), self.options.gamma)

    def adapt(self) -> Generator[Work, Any, None]:
        """Local training once more, then turns of simplex and projection on features that no longer change.

        The body stands still in the turns, so its features are computed once, of plain images in eval mode. The
        released code runs the body again in each of the turns' epochs, in training mode, which changes its batch-norm
        statistics. That takes turns * 2 * turn_epochs passes (by default 120) over the site's images before each
        evaluation. It also fits the head to other features than those that it is measured on.
        """
        options = self.options
        yield Train(epochs=options.finetune_epochs)
        if options.turns:
            seen = yield Scan("train", self.sample, reduce="concatenate")
            self.take_turns(seen["features"], seen["labels"])

    def sample(self, batch: Batch) -> Tensors:
        """Features (B, D) of a batch and its labels (B,)."""
        return {"features": self.outputs(batch).features, "labels": batch.label}

    def take_turns(self, features: Tensor, labels: Tensor) -> None:
        """Fit simplex and projection in turns, by cross entropy, to features (n, D) and labels (n,)."""
        options, head = self.options, self.net.head
        generator = self.random("turns")
        decay = self.setting.config.train.optimiser.weight_decay
        simplex = OptimiserConfig(lr=options.simplex_lr, momentum=0.0)
        projection = OptimiserConfig(lr=options.projection_lr, momentum=0.9, weight_decay=decay)
        for _ in range(options.turns):
            for part, config in (("class_vectors", simplex), ("projection", projection)):
                chosen = [(name, p) for name, p in head.named_parameters() if name.startswith(part)]
                optimiser = Optimiser(chosen, config)
                optimiser.lr.fill_(config.lr)
                for rows in shuffled_batches(len(labels), options.turn_batch, options.turn_epochs, generator):
                    loss = cross_entropy(head(features[rows]), labels[rows])
                    optimiser.update(torch.autograd.grad(loss, optimiser.parameters))


METHOD = Method(
    server=FedETFServer,
    client=FedETFClient,
    paper=(
        "Li et al., No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed "
        "Classifier, ICCV 2023"
    ),
    year=2023,
    changes="head (fixed simplex), loss (balanced softmax), personalisation (fine-tuning)",
    options=Options,
)
