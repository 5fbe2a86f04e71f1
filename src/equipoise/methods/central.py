"""Central learning: all training images at one site. What federation could reach at best, where pooling is allowed."""

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.method import Method

METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="no paper: pooled data",
    year=0,
    changes="pools the training images of all sites",
    pooled=True,
)
