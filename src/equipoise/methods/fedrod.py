"""FedRoD: a generic head, trained by a balanced loss, travels with the body. A personal head stays at each site and
adds to it, trained by plain cross entropy. Both predictors belong to one model.

Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022. The personal
head is the paper's linear one; the one that a hypernetwork generates is left out.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.balanced_softmax import FEW_LEFT
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Batch, Method
from equipoise.contract.summed import averaged
from equipoise.losses import balanced_softmax, cross_entropy


class Options(MethodOptions):
    """FedRoD's balanced loss. It takes the place of train.loss: the two heads differ by their losses."""

    gamma: float = Field(1.0, ge=0, description="exponent of the class counts in the balanced softmax (FedBM: 1)")

    def holds(self) -> AbstractSet[str]:
        return {"loss"}

    def lacks(self) -> AbstractSet[str]:
        few = {"absent classes"} if self.gamma >= FEW_LEFT else set()
        return {"supervised", "plain forward", "plain loss", *few}


class FedRoDClient(FedAvgClient):
    """Trains body and generic head by one loss and the personal head by another, in one step."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": FedAvgClient.discloses["train"]
        | {"model": averaged("body and generic head after local training, with batch-norm statistics")}
    }
    views = ("global", "personal")

    def build(self) -> None:
        super().build()
        self.personal_head = self.setting.seeded("personal head", self.new_head)
        self.keeps("personal_head", self.personal_head)
        self.phase("main", {"net": self.net, "personal_head": self.personal_head})

    def new_head(self) -> nn.Module:
        """A head of zeros: at first the personal predictor is the generic one."""
        head = self.net.another_head()
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        return head

    def forward(self, batch: Batch) -> Any:
        """Features (B, D), logits (B, C) of the generic head, and their sum with those of the personal head.

        That sum gives no gradient to body and generic head.
        """
        features = self.net.features(batch.image)
        dropped = self.net.dropout(features)
        logits = self.net.logits_of(self.net.head, dropped)
        personal = logits.detach() + self.net.logits_of(self.personal_head, dropped.detach())
        return SimpleNamespace(features=features, logits=logits, personal_logits=personal)

    def loss(self, batch: Batch, out: Any) -> Tensor:
        generic = balanced_softmax(out.logits, batch.label, self.class_counts, self.options.gamma)
        return generic + cross_entropy(out.personal_logits, batch.label)

    def predict(self, view: str, batch: Batch) -> Tensor:
        out = self.outputs(batch)
        return out.logits if view == "global" else out.personal_logits


METHOD = Method(
    server=FedAvgServer,
    client=FedRoDClient,
    paper="Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022",
    year=2022,
    changes="loss (balanced softmax), personalisation (second head)",
    options=Options,
)
