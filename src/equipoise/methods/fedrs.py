"""FedRS: a site scales down the logits of classes that it lacks, so that its training does not push them away.

Li and Zhan, FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data, KDD 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.restricted import Restricted
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method
from equipoise.core.table import LATER


class Options(MethodOptions):
    """What FedRS scales logits by. Paper and released code differ under long tails: `graded` is the code.

    The scaled logits go into the loss that train.loss names (FedNPR: the balanced softmax).
    """

    alpha: float = Field(
        0.5, ge=0, le=1, description="factor of the logits of missing classes (FedIIC: 0); 1: all alike, FedAvg"
    )

    graded: bool = Field(
        False,
        description="scale every class by alpha + (1 - alpha) n_c / n_max, as released; false: missing classes alone",
        json_schema_extra=LATER,
    )

    def components(self) -> Sequence[Component]:
        return [Restricted(alpha=self.alpha, graded=self.graded)] if self.alpha < 1 else []


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper=(
        "Li and Zhan, FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data, KDD 2021"
    ),
    year=2021,
    changes="loss (restricted softmax)",
    options=Options,
)
