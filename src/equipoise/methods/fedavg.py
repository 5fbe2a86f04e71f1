"""FedAvg: sites train the global model, the server averages what they return, weighted by their number of images.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
"""

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.method import Method

METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017",
    year=2017,
    changes="nothing: the base of the others",
)
