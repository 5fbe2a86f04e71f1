"""FedIIC: margins by class difficulty calibrate the classifier, contrast within a site and against prototypes that
the server makes of the classifier calibrates the features; for classes that are imbalanced over all sites.

Wu et al., FedIIC: Towards Robust Federated Learning for Class-Imbalanced Medical Image Classification, MICCAI 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from equipoise.components._merging import average, total
from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.config import Table
from equipoise.contract.method import Batch, Method, Setting
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, PerSite, Scan, Tensors, Value
from equipoise.contract.repeat import Repeated
from equipoise.losses import (
    class_loss_sums,
    difficulty_margins,
    inter_client_contrastive,
    intra_client_contrastive,
    logit_adjusted,
)
from equipoise.prototypes import drive_apart


class Options(Table):
    """FedIIC's weights and switches; the defaults are the paper's, read against the released code."""

    dala: bool = Field(True, description="difficulty-aware logit adjustment; off: the loss that train.loss names")
    exponent: float = Field(0.25, ge=0, description="d of the difficulty in the margins; 0: class frequency alone")
    difficulty_view: Literal["plain", "augmented", "cached"] = Field(
        "plain",
        description="images that difficulty is measured on: as in evaluation, a training view drawn anew each round, "
        "or one drawn once for all rounds (released)",
    )
    k1: float = Field(2.0, ge=0, description="weight of the contrast within a site; 0: off")
    power: float = Field(0.5, ge=0, description="t of the temperature (p_i p_j)^t; 0: the same for all classes")
    temperature: PositiveFloat = Field(1.0, description="tau, the factor of that temperature")
    floor: float = Field(0.07, ge=0, description="least temperature of the contrast within a site")
    k2: float = Field(2.0, ge=0, description="weight of the contrast against the server's prototypes; 0: off")
    prototype_temperature: PositiveFloat = Field(0.1, description="temperature of the contrast against prototypes")
    orthogonalise: bool = Field(True, description="drive the prototypes apart before they are sent")
    diagonal: Literal["zero", "exclude"] = Field(
        "zero", description="zero: rest at right angles (as released); exclude: as far apart as can be (Eq. 5)"
    )
    orthogonal_steps: PositiveInt = Field(1000, description="gradient steps that drive prototypes apart")
    orthogonal_lr: PositiveFloat = Field(0.1, description="their learning rate")
    projection: PositiveInt = Field(1024, description="size of the projected features")
    projector_relu: bool = Field(False, description="a ReLU between the projector's two layers (released: none)")
    two_views: Literal["auto", "always"] = Field(
        "auto", description="auto: a second view only where a contrast needs it; always: batch norm sees it anyway"
    )

    @property
    def contrastive(self) -> bool:
        """Whether either contrast is on, and so the projector is there."""
        return self.k1 > 0 or self.k2 > 0

    def unused(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if not self.dala:
            found |= dict.fromkeys(("exponent", "difficulty_view"), "fediic.dala is false")
        if not self.k1:
            found |= dict.fromkeys(("power", "temperature", "floor"), "fediic.k1 is 0")
        if not self.orthogonalise:
            found |= dict.fromkeys(("diagonal", "orthogonal_steps", "orthogonal_lr"), "fediic.orthogonalise is false")
        if not self.k2:
            about = ("prototype_temperature", "orthogonalise", "diagonal", "orthogonal_steps", "orthogonal_lr")
            found |= dict.fromkeys(about, "fediic.k2 is 0")
        if self.contrastive:
            found["two_views"] = "a contrast needs two views anyway"
        else:
            found |= dict.fromkeys(("projection", "projector_relu"), "fediic.k1 and fediic.k2 are 0")
        return found


def new_projector(setting: Setting, feature_size: int) -> nn.Module:
    """The projector h: features (B, D) -> (B, projection), the same at first everywhere."""
    options = setting.options

    def make() -> nn.Module:
        layers: dict[str, nn.Module] = {"hidden": nn.Linear(feature_size, feature_size)}
        if options.projector_relu:
            layers["relu"] = nn.ReLU()
        layers["output"] = nn.Linear(feature_size, options.projection)
        return nn.Sequential(OrderedDict(layers))

    return setting.seeded("projector", make)


class FedIICServer(FedAvgServer):
    """Asks how hard each class is, makes the prototypes, and averages net and projector."""

    def setup(self) -> None:
        super().setup()
        if self.options.contrastive:
            self.projector = new_projector(self.setting, self.state.model["head.weight"].shape[1])
            self.state.projector = self.projector.state_dict()
        if self.options.k2:
            # Steps on a matrix so small that a GPU would spend all its time on launches: they are replayed there.
            self.vectors = torch.zeros(self.setting.num_classes, self.options.projection, device=self.setting.device)
            self.repeated = Repeated(self.setting.device, capture=self.setting.config.compute.capture)

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        options, state = self.options, self.state
        message: dict[str, Value | PerSite] = {"model": state.model}
        if options.dala:
            surveys = yield Ask("survey", sites, model=state.model)
            sites = surveys.sites  # the classes of a site that did not answer would pass for the easiest
            state.difficulty = total(surveys, "class_loss") / (1e-5 + total(surveys, "class_count"))
            message["difficulty"] = state.difficulty
        if options.contrastive:
            message["projector"] = state.projector
        if options.k2:
            state.prototypes = self.prototypes()
            message["prototypes"] = state.prototypes
        updates = yield Ask("train", sites, **message)
        weighting = self.setting.config.train.aggregation
        state.model = average(updates, "model", weighting)
        if options.contrastive:
            state.projector = average(updates, "projector", weighting)

    @torch.no_grad()
    def prototypes(self) -> Tensor:
        """Unit prototypes (C, projection): the classifier's weights, projected and driven apart (Eq. 5)."""
        options, state = self.options, self.state
        weights = state.model["head.weight"]
        projected = torch.func.functional_call(self.projector, state.projector, (weights,))
        self.vectors.copy_(projected)
        step = partial(drive_apart, self.vectors, options.orthogonal_lr, options.diagonal)
        self.repeated(step, options.orthogonal_steps if options.orthogonalise else 0)
        return F.normalize(self.vectors, dim=1)


class FedIICClient(FedAvgClient):
    """Trains on two views of each image in one forward pass, so that batch norm sees both."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "survey": {
            "class_loss": "the received model's loss on the local training images, summed by class",
            "class_count": "number of local training images of each class",
        },
        "train": {
            **FedAvgClient.discloses["train"],
            "projector": "the projector's weights after local training",
        },
    }

    @classmethod
    def ignores(cls, setting: Setting) -> tuple[str, ...]:
        return ("train.loss",) if setting.options.dala else ()

    @classmethod
    def decays_absent(cls, setting: Setting) -> bool:
        return bool(setting.options.dala)  # the margins leave such a class out of the softmax

    def build(self) -> None:
        super().build()
        options = self.options
        self.image_views = 2 if options.contrastive or options.two_views == "always" else 1
        if options.dala:
            self.difficulty = self.receives("difficulty", torch.zeros(self.num_classes))
            self.margins = self.scratch("margins", torch.zeros(self.num_classes))
        if options.contrastive:
            self.projector = new_projector(self.setting, self.net.feature_size)
            self.receives("projector", self.projector)
            self.phase("main", nn.ModuleDict({"net": self.net, "projector": self.projector}))
        if options.k2:
            self.prototypes = self.receives("prototypes", torch.zeros(self.num_classes, options.projection))

    def survey(self, message: Payload) -> Action:
        """How hard each class is for the received model, before training."""
        return (yield Scan("train", self.class_losses, view=self.options.difficulty_view))

    def class_losses(self, batch: Batch) -> Tensors:
        """Summed loss and number of samples of each class in a batch, (C,) each."""
        losses, counts = class_loss_sums(self.outputs(batch).logits, batch.label)
        return {"class_loss": losses, "class_count": counts}

    def train(self, message: Payload) -> Action:
        if self.options.dala:
            self.margins.copy_(difficulty_margins(self.class_counts, self.difficulty, self.options.exponent))
        return (yield from super().train(message))

    def update(self) -> Payload:
        projector = {"projector": self.share(self.projector)} if self.options.contrastive else {}
        return {**super().update(), **projector}

    def forward(self, batch: Batch) -> Any:
        """Features (B, D) and logits (B, C) of the first view, and in training projections (B, 2, P) of both."""
        if not hasattr(batch, "second"):
            return super().forward(batch)
        features = self.net.features(torch.cat([batch.image, batch.second]))
        first = features[: len(batch.label)]
        out = SimpleNamespace(features=first, logits=self.net.classify(first))
        if self.options.contrastive:
            out.projections = self.projector(features).unflatten(0, (2, -1)).transpose(0, 1)
        return out

    def loss(self, batch: Batch, out: Any) -> Tensor:
        """DALA (Eq. 6) + k1 intra-client contrast (Eq. 3) + k2 inter-client contrast (Eq. 4), as in Eq. 7."""
        options = self.options
        loss = logit_adjusted(out.logits, batch.label, self.margins) if options.dala else super().loss(batch, out)
        if not options.contrastive:
            return loss
        units = F.normalize(out.projections, dim=-1)
        if options.k1:
            loss = loss + options.k1 * intra_client_contrastive(
                units, batch.label, self.class_counts, options.power, options.temperature, options.floor
            )
        if options.k2:
            loss = loss + options.k2 * inter_client_contrastive(
                units, batch.label, self.prototypes, options.prototype_temperature
            )
        return loss


METHOD = Method(
    server=FedIICServer,
    client=FedIICClient,
    paper=(
        "Wu et al., FedIIC: Towards Robust Federated Learning for Class-Imbalanced Medical Image Classification, "
        "MICCAI 2023"
    ),
    year=2023,
    changes="loss (margins, two contrasts), prototypes from the server",
    options=Options,
)
