"""Central learning: all training images at one site. What federation could reach at best, where pooling is allowed."""

from collections.abc import Set as AbstractSet

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """The method has no options."""

    def lacks(self) -> AbstractSet[str]:
        return {"sites"}


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="no paper: pooled data",
    year=0,
    changes="pools the training images of all sites",
    options=Options,
    pooled=True,
)
