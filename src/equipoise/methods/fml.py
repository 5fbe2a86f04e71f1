"""FML: each site trains a personal net beside the shared one (the authors' "meme"). Each net learns from the other's
predictions, and only shared nets are averaged.

Shen et al., Federated Mutual Learning, arXiv 2006.16765, 2020.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from equipoise.components._personal import TwoNetClient
from equipoise.components.averaging import FedAvgServer
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Batch, Method
from equipoise.contract.summed import averaged
from equipoise.losses import mutual_kl


class Options(MethodOptions):
    """How much each net learns from labels; the rest it learns from the other net."""

    alpha: float = Field(0.5, ge=0, le=1, description="weight of the labels for the personal net; 1: it learns alone")
    beta: float = Field(0.5, ge=0, le=1, description="weight of the labels for the shared net; 1: FedAvg")

    def holds(self) -> AbstractSet[str]:
        return {"carrier"}

    def lacks(self) -> AbstractSet[str]:
        return {"plain forward", "plain loss"}


class FMLClient(TwoNetClient):
    """Trains both nets in one step, each with the other as a teacher that gets no gradient."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": TwoNetClient.discloses["train"]
        | {"model": averaged("the shared net's weights and batch-norm statistics after local training")}
    }

    def build(self) -> None:
        super().build()
        self.phase("main", {"net": self.net, "personal": self.personal})

    def forward(self, batch: Batch) -> Any:
        """Features (B, D) and logits (B, C) of the shared net, logits (B, C) of the personal one."""
        out = super().forward(batch)
        out.personal_logits = self.personal(batch.image)
        return out

    def loss(self, batch: Batch, out: Any) -> Tensor:
        """The two nets' losses; no term of one gives a gradient to the other."""
        shared, personal = out.logits, out.personal_logits
        return self.mixed(shared, personal, batch.label, self.options.beta) + self.mixed(
            personal, shared, batch.label, self.options.alpha
        )

    def mixed(self, student: Tensor, teacher: Tensor, labels: Tensor, weight: float) -> Tensor:
        """weight * supervised loss + (1 - weight) * KL(teacher || student)."""
        supervised = self.supervised(student, labels)
        if weight == 1:
            return supervised
        return weight * supervised + (1 - weight) * mutual_kl(student, teacher)


METHOD = Method(
    server=FedAvgServer,
    client=FMLClient,
    paper="Shen et al., Federated Mutual Learning, arXiv 2006.16765, 2020",
    year=2020,
    changes="personalisation (second net), loss (mutual learning)",
    options=Options,
)
