"""FedPer: the body is averaged, and each site keeps a classifier; both train together.

Arivazhagan, Aggarwal, Singh and Choudhary, Federated Learning with Personalization Layers, arXiv 1912.00818, 2019. The
paper also keeps the last blocks of the body at the sites; here the classifier stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.components.personal_head import PersonalHead
from equipoise.contract.component import Component
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method


class Options(MethodOptions):
    """The method has no options."""

    def components(self) -> Sequence[Component]:
        return [PersonalHead()]


METHOD = Method(
    server=FedAvgServer,
    client=FedAvgClient,
    paper="Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818, 2019",
    year=2019,
    changes="personalisation (head)",
    options=Options,
)
