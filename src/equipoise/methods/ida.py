"""IDA: the nearer a site's model is to the mean of all, the more it counts, so that outliers count little.

Yeganeh et al., Inverse Distance Aggregation for Federated Learning with Non-IID Data, DCL workshop at MICCAI 2020. No
code was released. The paper's floor of the training accuracy, 1 / K, can be read as chance or by the number of sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.inverse_distance import InverseDistance
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method
from equipoise.core.table import LATER


class Options(MethodOptions):
    """Factors of a site's weight, multiplied. They take the place of train.aggregation."""

    distance: bool = Field(True, description="inverse L1 distance between the site's model and the mean of all")
    size: bool = Field(False, description="number of images, as in FedAvg")
    accuracy: bool = Field(False, description="inverse training accuracy, the paper's INTRAC: against overfitted sites")

    floor: Literal["classes", "sites"] = Field(
        "classes",
        description="least accuracy that counts: 1 / classes, which is chance, or 1 / sites, another reading of the "
        "paper's 1 / K",
        json_schema_extra=LATER,
    )

    def components(self) -> Sequence[Component]:
        return [InverseDistance(**self.model_dump())]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Yeganeh et al., Inverse Distance Aggregation for Federated Learning with Non-IID Data, MICCAI DCL 2020",
    year=2020,
    changes="aggregation (inverse distance to the mean)",
    options=Options,
)
