"""A site's net keeps what the received net says of the wrong classes: distillation over all classes but the label
(FedNTD)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.components._received import ReceivedTeacherSite
from equipoise.contract.component import Batch, Component, SiteSide
from equipoise.losses import not_true_kl


class NotTrueSite(ReceivedTeacherSite):
    """Adds the distillation."""

    def loss(self, batch: Batch, out: Any, loss: Tensor) -> Tensor:
        term = not_true_kl(out.logits, self.taught(batch), batch.label, self.options.temperature)
        return loss + self.options.beta * term


class NotTrue(Component):
    """Not-true distillation."""

    name: ClassVar[str] = "not-true"
    paper: ClassVar[str] = "Lee et al., FedNTD, NeurIPS 2022"
    rank: ClassVar[int] = 46
    image_by_image: ClassVar[bool] = True
    limit: ClassVar[Mapping[str, Any]] = {"beta": 0}
    Site: ClassVar[type[SiteSide]] = NotTrueSite

    beta: float = Field(1.0, ge=0, description="weight of the distillation; 0: none")
    temperature: PositiveFloat = Field(1.0, description="tau, by which both nets' logits are divided")

    def needs(self) -> AbstractSet[str]:
        return {"model", "net trains", "plain forward", "one training ask"}

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return {} if self.beta else {"temperature": "beta is 0"}


COMPONENT = NotTrue
