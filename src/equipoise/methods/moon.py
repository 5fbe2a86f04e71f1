"""MOON: contrast between models. Features of local training are drawn to those of the global model, and away from those
of the site's own model of the round before.

Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, PositiveFloat

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.model_contrast import ModelContrast
from equipoise.components.projection import Projection
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """MOON's contrast; its paper tunes mu among 0.1, 1, 5 and 10."""

    mu: float = Field(1.0, ge=0, description="weight of the contrast (FedIIC: 10); 0: off, and no projection: FedAvg")
    temperature: PositiveFloat = Field(0.5, description="tau of the contrast")
    projection: int = Field(
        256, ge=0, description="size of the features after a two-layer projection, as in FedNPR's net; 0: no projection"
    )

    def components(self) -> Sequence[Component]:
        if not self.mu:
            return []
        contrast = ModelContrast(mu=self.mu, temperature=self.temperature)
        return [Projection(size=self.projection), contrast] if self.projection else [contrast]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Li et al., Model-Contrastive Federated Learning, CVPR 2021",
    year=2021,
    changes="loss (contrast between models)",
    options=Options,
)
