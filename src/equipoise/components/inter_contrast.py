"""Contrast against prototypes that the server makes of the classifier and drives apart (FedIIC, Eqs. 4 and 5)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from equipoise.contract.component import Batch, Component, Message, ServerSide, SiteSide
from equipoise.contract.protocol import Ask, Replies
from equipoise.contract.repeat import Repeated
from equipoise.losses import inter_client_contrastive
from equipoise.prototypes import drive_apart


class InterContrastServer(ServerSide):
    """Makes the prototypes of the classifier before each round."""

    def setup(self) -> None:
        # Steps on a matrix so small that a GPU would spend all its time on launches: they are replayed there.
        size = self.side("projector").options.size
        self.vectors = torch.zeros(self.setting.num_classes, size, device=self.setting.device)
        self.repeated = Repeated(self.setting.device, capture=self.setting.config.compute.capture)

    def survey(self, number: int, sites: Sequence[str]) -> Generator[Ask, Replies, Sequence[str]]:
        self.state.prototypes = self.prototypes()
        yield from ()
        return sites

    def message(self, number: int) -> Message:
        known = "prototypes" in self.state  # not yet, where personal models are fine-tuned before the first round
        return {"prototypes": self.state.prototypes if known else self.prototypes()}

    @torch.no_grad()
    def prototypes(self) -> Tensor:
        """Unit prototypes (C, projection): the classifier's weights, projected and driven apart (Eq. 5)."""
        options, projector = self.options, self.side("projector")
        weights = self.server.state.model["head.weight"]
        self.vectors.copy_(torch.func.functional_call(projector.module, projector.state.projector, (weights,)))
        step = partial(drive_apart, self.vectors, options.orthogonal_lr, options.diagonal)
        self.repeated(step, options.orthogonal_steps if options.orthogonalise else 0)
        return F.normalize(self.vectors, dim=1)


class InterContrastSite(SiteSide):
    """Adds the contrast to the loss."""

    def build(self) -> None:
        size = self.side("projector").options.size
        self.prototypes = self.receives("prototypes", torch.zeros(self.num_classes, size))

    def loss(self, batch: Batch, out: Any, loss: Tensor) -> Tensor:
        options = self.options
        return loss + options.weight * inter_client_contrastive(
            out.units, batch.label, self.prototypes, options.temperature
        )


class InterContrast(Component):
    """Inter-client contrast."""

    name: ClassVar[str] = "inter-contrast"
    paper: ClassVar[str] = "Wu et al., FedIIC, MICCAI 2023"
    rank: ClassVar[int] = 41
    limit: ClassVar[Mapping[str, Any]] = {"weight": 0}
    at_little_cost: ClassVar[tuple[str, ...]] = ("inter-contrast.orthogonal_steps=10",)
    Site: ClassVar[type[SiteSide]] = InterContrastSite
    Server: ClassVar[type[ServerSide]] = InterContrastServer

    weight: float = Field(2.0, ge=0, description="k2, weight of the contrast")
    temperature: PositiveFloat = Field(0.1, description="temperature of the contrast")
    orthogonalise: bool = Field(True, description="drive the prototypes apart before they are sent")
    diagonal: Literal["zero", "exclude"] = Field(
        "zero", description="zero: rest at right angles (as released); exclude: as far apart as can be (Eq. 5)"
    )
    orthogonal_steps: PositiveInt = Field(1000, description="gradient steps that drive prototypes apart")
    orthogonal_lr: PositiveFloat = Field(0.1, description="learning rate of these steps")

    def needs(self) -> AbstractSet[str]:
        return {"projections", "model", "class head", "image labels"}

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        if self.orthogonalise:
            return {}
        return dict.fromkeys(("diagonal", "orthogonal_steps", "orthogonal_lr"), "orthogonalise is false")


COMPONENT = InterContrast
