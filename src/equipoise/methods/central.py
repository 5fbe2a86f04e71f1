"""Central learning: all training images at one site. What federation could reach at best, where pooling is allowed."""

from equipoise.engine.contract import Method
from equipoise.methods.fedavg import FedAvgClient, FedAvgServer

METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="no paper: pooled data",
    year=0,
    changes="pools the training images of all sites",
    pooled=True,
)
