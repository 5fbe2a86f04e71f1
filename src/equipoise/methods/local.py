"""Local learning: every site trains a separate model and shares nothing. The bar that federation has to pass."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar

from equipoise.components.averaging import FedAvgClient
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Method, Server
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, Train


class Options(MethodOptions):
    """The method has no options."""

    def holds(self) -> AbstractSet[str]:
        return {"merge", "carrier"}

    def lacks(self) -> AbstractSet[str]:
        return {"model", "whole model", "one model", "class head", "net trains"}


class LocalServer(Server):
    """Only keeps the rounds in step."""

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        yield Ask("train", sites)


class LocalClient(FedAvgClient):
    """Keeps its whole net."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {"train": {}}
    views = ("personal",)
    image_by_image: ClassVar[bool] = True

    def build(self) -> None:
        self.net = self.new_net()
        self.keeps("net", self.net)
        self.phase("main", self.net)

    def train(self, message: Payload) -> Action:
        yield Train()
        return {}


METHOD = Method(
    options=Options,
    server=LocalServer,
    client=LocalClient,
    paper="no paper: each site alone",
    year=0,
    changes="no communication",
)
