"""FedNPR: FedAvg with a balanced softmax and a pull of features towards prototypes of class sub-clusters. Each site
computes its prototypes and never sends them.

Wicaksana, Yan and Cheng, Non-parametric Regularization for Class Imbalance Federated Medical Image
Classification, 2024 (arXiv 2407.12446). The regularisation, NPR, goes on top of any method: `npr.weight = 0.1`.
"""

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.method import Method

PAPER = (
    "Wicaksana et al., Non-parametric Regularization for Class Imbalance Federated Medical Image Classification, "
    "arXiv 2407.12446, 2024"
)
DEFAULTS = {"train": {"loss": "balanced_softmax"}, "npr": {"weight": 0.1}}

METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=PAPER,
    year=2024,
    changes="loss (balanced softmax, sub-cluster prototypes)",
    defaults=DEFAULTS,
)
