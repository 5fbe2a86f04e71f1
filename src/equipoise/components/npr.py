"""Pull features towards prototypes of sub-clusters. Each site finds the sub-clusters of a class among its images and
keeps them (NPR).

`npr.weight` above 0 puts this component on any method. Its options are the table `npr` of every config.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.contract.component import Batch, Component, SiteSide
from equipoise.contract.protocol import Payload, Scan, Tensors, Work
from equipoise.contract.tables import NprConfig
from equipoise.core.errors import UserError
from equipoise.losses import subcluster_regularisation, subcluster_scores
from equipoise.nets import Net
from equipoise.prototypes import update_subclusters

ABSENT = -1e4
"""Score of a class without sub-clusters: below every other, yet finite, as is then the loss of its images."""


class NprSite(SiteSide):
    """Finds sub-clusters before each training, and adds their pull to the loss."""

    def build(self) -> None:
        nets = [net for module in self.client.workplace.modules() for net in module.modules() if isinstance(net, Net)]
        if not nets:
            raise self._unfit("has no net with features")
        shape = (self.num_classes, self.options.clusters, nets[0].feature_size)
        first = self.setting.seeded("subclusters", lambda: nn.init.trunc_normal_(torch.empty(shape), std=0.02))
        self.subclusters = self.keeps("subclusters", first)
        self.clustered = self.keeps("clustered", torch.zeros(self.num_classes, dtype=torch.bool))

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        """Find the sub-clusters of the local training images, as the received model sees them (Eqs. 1 and 2)."""
        seen = yield Scan("train", self.sample, view=self.options.view, reduce="concatenate")
        draws = self.client.random("subclusters")
        self.subclusters.copy_(
            update_subclusters(seen["features"], seen["labels"], self.subclusters, self.options.cluster, draws)
        )
        self.note("nearest_images", self.sizes(seen["features"], seen["labels"]))
        # One image makes no sub-cluster: its class keeps its first, random prototypes, which must not attract.
        self.clustered.copy_(self.class_counts > 1)

    def sizes(self, features: Tensor, labels: Tensor) -> Tensor:
        """How many training images of its class lie nearest to each sub-cluster: (C, K)."""
        subclusters = self.subclusters.to(features.dtype)
        near = torch.stack([(features * own[labels]).sum(1) for own in subclusters.unbind(1)], dim=1).argmax(1)
        cells = labels * subclusters.shape[1] + near
        found = features.new_zeros(subclusters.shape[0] * subclusters.shape[1])
        return found.scatter_add_(0, cells, torch.ones_like(cells, dtype=found.dtype)).reshape(subclusters.shape[:2])

    def begin_adapting(self) -> Generator[Work, Any, None]:
        """The sub-clusters of the last training hold."""
        yield from ()

    def adapt(self) -> Generator[Work, Any, None]:
        """Find the sub-clusters anew: those kept belong to the model before its last change."""
        yield from self.begin({})

    def sample(self, batch: Batch) -> Tensors:
        """Features (B, D) and labels (B,) of a batch."""
        return {"features": self.features(batch, self.client.outputs(batch)), "labels": batch.label}

    def features(self, batch: Batch, out: Any) -> Tensor:
        """The features (B, D) among the outputs of the method's forward pass."""
        found = getattr(out, "features", None)
        expected = (len(batch.image), self.subclusters.shape[-1])
        if found is None or found.shape != expected:
            shape = "without features" if found is None else f"with features of shape {tuple(found.shape)}"
            raise self._unfit(f"has a forward pass {shape}, not {expected}")
        return found

    def pull(self, batch: Batch, out: Any) -> Tensor:
        """L_npr (Eq. 3) over the classes that have sub-clusters here, or over all."""
        options = self.options
        return subcluster_regularisation(
            self.features(batch, out),
            batch.label,
            self.subclusters,
            options.normalise,
            options.temperature,
            self.competing(),
        )

    def competing(self) -> Tensor | None:
        """The mask (C,) of the classes in layer norm and softmax; None: all."""
        return self.clustered if self.options.classes == "present" else None

    def loss(self, batch: Batch, out: Any, loss: Tensor) -> Tensor:
        """L_sup + lambda L_npr (Eq. 5), where L_sup is the method's loss; or L_npr alone."""
        pull = self.options.weight * self.pull(batch, out)
        return loss + pull if self.options.supervised else pull

    def predicts(self, view: str) -> bool:
        return not self.options.supervised

    def predict(self, view: str, batch: Batch) -> Tensor:
        """Scores by the nearest prototype (Table IV, without global supervision)."""
        options, features = self.options, self.features(batch, self.client.outputs(batch))
        scores = subcluster_scores(features, self.subclusters, options.normalise, options.temperature, self.competing())
        return scores.masked_fill(~self.clustered, ABSENT)

    def _unfit(self, why: str) -> UserError:
        method = self.setting.config.method
        return UserError(f"npr.weight = {self.options.weight:g}: the method {method} {why}; set it to 0")


class Npr(Component, NprConfig):
    """Non-parametric regularisation by sub-cluster prototypes."""

    name: ClassVar[str] = "npr"
    paper: ClassVar[str] = "Wicaksana et al., Non-parametric Regularization, arXiv 2407.12446, 2024"
    rank: ClassVar[int] = 90
    limit: ClassVar[Mapping[str, Any]] = {"weight": 0}
    flat: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {"npr": {"weight": 0.1}}
    Site: ClassVar[type[SiteSide]] = NprSite

    def needs(self) -> AbstractSet[str]:
        return {"pooled features"} if self.weight else set()

    def views(self, views: tuple[str, ...]) -> tuple[str, ...]:
        return views if self.supervised else ("personal",)

    @property
    def sole_loss(self) -> bool:
        return not self.supervised

    @property
    def adapts(self) -> bool:
        return not self.supervised


COMPONENT = Npr
