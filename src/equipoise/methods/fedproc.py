"""FedProc: a contrast pulls features to the federation's prototype of their class and away from other prototypes. Over
the rounds, the supervised loss takes over.

Mu et al., FedProc: Prototypical contrastive federated learning on non-IID data, Future Generation Computer Systems 143,
2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.components._merging import class_means, class_sums, mean_by_class
from equipoise.components._projection import projected_net
from equipoise.components.averaging import FedAvgClient, FedAvgServer, SharedNet
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.disclosed import Entry
from equipoise.contract.method import Batch, Method
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, Scan, Tensors
from equipoise.contract.summed import added, averaged_by_class
from equipoise.losses import prototype_contrastive
from equipoise.nets import Net


class Options(MethodOptions):
    """FedProc's contrast; the defaults are the released code's."""

    alpha: float = Field(
        1.0, ge=0, le=1, description="alpha (1 - t/T) weighs the contrast after t of T rounds; 0: off, FedAvg"
    )
    temperature: PositiveFloat = Field(1.0, description="divides the cosines between features and prototypes")
    projection: int = Field(
        256, ge=0, description="size of the unit features after a two-layer projection; 0: the net's own features"
    )

    def holds(self) -> AbstractSet[str]:
        return {"head"}

    def needs(self) -> AbstractSet[str]:
        return {"pooled features"}

    def lacks(self) -> AbstractSet[str]:
        return {"plain loss"}


class FedProcNet(SharedNet):
    """The net with FedProc's projection; without a contrast, the plain net."""

    def new_net(self) -> Net:
        options = self.setting.options
        return projected_net(self.setting, options.projection if options.alpha else 0, unit=True)


class FedProcServer(FedProcNet, FedAvgServer):
    """Keeps the prototypes (C, D): the mean feature of each class over all sites, and which classes have one."""

    def setup(self) -> None:
        super().setup()
        if self.options.alpha:
            shape = (self.setting.num_classes, self.new_net().feature_size)
            self.state.prototypes = torch.zeros(shape, device=self.setting.device)
            self.state.known = torch.zeros(shape[0], dtype=torch.bool, device=self.setting.device)

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        if not self.options.alpha:
            yield from super().round(number, sites)
            return
        state = self.state
        updates = yield Ask(
            "train",
            sites,
            model=self.model_for(sites),
            prototypes=state.prototypes,
            known=state.known,
            contrast=self.contrast(number),
        )
        state.model = self.merge(updates, number)
        means, present = mean_by_class(updates, "prototypes")
        state.prototypes = torch.where(present[:, None], means, state.prototypes)
        state.known = state.known | present

    def contrast(self, number: int) -> float:
        """The contrast's weight in a round; the first, which has no prototypes yet, is left to the supervised loss."""
        return self.options.alpha * (1 - (number - 1) / self.setting.config.train.rounds) if number > 1 else 0.0


class FedProcClient(FedProcNet, FedAvgClient):
    """Trains by both losses, then tells the mean feature of each of its classes."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": FedAvgClient.discloses["train"]
        | {
            "prototypes": averaged_by_class(
                Entry(
                    "mean feature of each class under the site's trained net, zeros for classes it lacks; of a class "
                    "with one image, that image's feature"
                ),
                weighting="size",
            ),
            "class_counts": added(Entry("number of local training images of each class", "counts")),
        }
    }

    def build(self) -> None:
        super().build()
        if self.options.alpha:
            self.prototypes = self.receives("prototypes", torch.zeros(self.num_classes, self.net.feature_size))
            self.known = self.receives("known", torch.zeros(self.num_classes, dtype=torch.bool))
            self.contrast = self.receives("contrast", torch.zeros(()))

    def train(self, message: Payload) -> Action:
        update = yield from super().train(message)
        if not self.options.alpha:
            return update
        seen = yield Scan("train", self.class_features)
        return update | {"prototypes": class_means(seen["sums"], seen["counts"]), "class_counts": seen["counts"]}

    def class_features(self, batch: Batch) -> Tensors:
        """Summed features (C, D) and number of samples (C,) of each class in a batch."""
        return class_sums(self.outputs(batch).features, batch.label, self.num_classes)

    def loss(self, batch: Batch, out: Any) -> Tensor:
        """(1 - alpha) supervised loss + alpha contrast."""
        supervised = super().loss(batch, out)
        if not self.options.alpha:
            return supervised
        contrast = prototype_contrastive(
            out.features, batch.label, self.prototypes, self.known, self.options.temperature
        )
        return torch.lerp(supervised, contrast, self.contrast)


METHOD = Method(
    server=FedProcServer,
    client=FedProcClient,
    paper="Mu et al., FedProc: Prototypical contrastive federated learning on non-IID data, FGCS 2023",
    year=2023,
    changes="loss (contrast with prototypes)",
    options=Options,
)
