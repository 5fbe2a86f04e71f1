"""A frozen classifier made of texts: a Gaussian for each class among text embeddings (FedBM's LKCC, Eqs. 2 to 5).

The net ends in a linear layer onto text embeddings. Any supervised loss can train under the classifier's logits.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from equipoise.components._texts import Texts, concept_classifier
from equipoise.contract.component import Batch, Message, ServerSide, SiteSide
from equipoise.contract.setting import Setting
from equipoise.nets import build_net
from equipoise.nets.concepts.distributions import ConceptClassifier


class ConceptsServer(ServerSide):
    """Makes the classifier once."""

    def setup(self) -> None:
        self.state.classifier = {n: v.clone() for n, v in self.options.made(self.setting).state_dict().items()}

    def message(self, number: int) -> Message:
        return {"classifier": self.state.classifier}

    def predicting(self) -> Message:
        return {"classifier": self.state.classifier}


class ConceptsSite(SiteSide):
    """Reads the net's output by the received classifier."""

    def build(self) -> None:
        self.classifier = self.receives("classifier", self.client.reference(self.options.made(self.setting)))

    def classify(self, output: Tensor) -> Tensor:
        return self.classifier(output)

    def loss(self, batch: Batch, out: Any, loss: Tensor) -> Tensor:
        """What the surrogate loss (Eq. 4) adds to the cross entropy of the logits: the spread of the true class."""
        labels = self.client.all_labels(batch).long()
        spread = F.normalize(out.output, dim=-1).square() * self.classifier.variance[labels]
        return loss + (self.classifier.temperature**2 / 2 * spread.sum(-1)).mean()


class Concepts(Texts):
    """Concept classifier."""

    name: ClassVar[str] = "concepts"
    paper: ClassVar[str] = "Zhu et al., FedBM, Medical Image Analysis 2025"
    rank: ClassVar[int] = 6
    Site: ClassVar[type[SiteSide]] = ConceptsSite
    Server: ClassVar[type[ServerSide]] = ConceptsServer

    classifier: Literal["distribution", "averaged", "random"] = Field(
        "distribution", description="frozen: mean and variance of the texts, their mean alone, random directions"
    )
    temperature: PositiveFloat = Field(12.5, description="tau of Eq. 5; the authors tuned 7.5 to 17.5 per setting")

    def holds(self) -> AbstractSet[str]:
        return {"head"}

    def needs(self) -> AbstractSet[str]:
        return {"model", "plain forward", "supervised", "pooled features"}

    def lacks(self) -> AbstractSet[str]:
        return {"class head"}

    def new_net(self, setting: Setting) -> Any:
        width = self.embeddings(setting).shape[-1]
        return setting.seeded("net", lambda: build_net(setting.config.net, width, setting.channels))

    def made(self, setting: Setting) -> ConceptClassifier:
        """The classifier in its first state."""
        return concept_classifier(setting, self.embeddings(setting), self.classifier, self.temperature)


COMPONENT = Concepts
