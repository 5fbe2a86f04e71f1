"""For classes that a site lacks, its net keeps the received net's predictions; logits of wrong classes are held down
(FedVLS)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from equipoise.components._received import ReceivedTeacherSite
from equipoise.contract.component import Batch, Component, SiteSide
from equipoise.losses import logit_suppression, vacant_kl


class VacantSite(ReceivedTeacherSite):
    """Adds both terms."""

    def loss(self, batch: Batch, out: Any, loss: Tensor) -> Tensor:
        distilled = vacant_kl(out.logits, self.taught(batch), self.class_counts)
        held_down = logit_suppression(out.logits, batch.label, self.class_counts)
        return loss + self.options.distillation * distilled + self.options.suppression * held_down


class Vacant(Component):
    """Vacant-class distillation and logit suppression."""

    name: ClassVar[str] = "vacant"
    paper: ClassVar[str] = "Guo et al., FedVLS, AAAI 2025"
    rank: ClassVar[int] = 47
    limit: ClassVar[Mapping[str, Any]] = {"distillation": 0, "suppression": 0}
    Site: ClassVar[type[SiteSide]] = VacantSite

    distillation: float = Field(
        0.1, ge=0, description="weight of the distillation over classes that the site lacks (its script's default: 1)"
    )
    suppression: float = Field(0.005, ge=0, description="weight of the suppression of wrong classes' logits")

    def gives(self) -> AbstractSet[str]:
        return {"absent classes"} if self.distillation else set()

    def needs(self) -> AbstractSet[str]:
        return {"model", "net trains", "plain forward", "one training ask"}


COMPONENT = Vacant
