"""FedAvg, the base of other methods: sites train the global model, the server averages what they return.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor, nn

from equipoise.components._merging import average
from equipoise.contract.disclosed import Entry
from equipoise.contract.method import Batch, Client, Server, Setting
from equipoise.contract.modules import share
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, PerSite, Replies, Tensors, Train, Value
from equipoise.contract.summed import added, averaged
from equipoise.nets import Net


class SharedNet:
    """What server and client must know alike: which net is trained, and which of its entries travel.

    A method that changes either does so in a class of this kind, which both its sides inherit.
    """

    setting: Setting

    def new_net(self) -> Net:
        """The net in its first state, the same everywhere."""
        return self.setting.new_net()

    def shared_entries(self, net: nn.Module) -> Iterable[str]:
        """The state-dict names that travel; all of them here."""
        return net.state_dict().keys()


class FedAvgServer(SharedNet, Server):
    """Averages the entries of the model that sites share.

    >>> import equipoise as eq
    >>> from equipoise.contract.config import Config
    >>> fed = eq.load_federation("phantom", phantom={"images": 60, "sites": 2, "classes": 3, "size": 16})
    >>> method = eq.Method(eq.FedAvgServer, eq.FedAvgClient, "none", 2026, "nothing")
    >>> setting = eq.Setting.of(Config(), method, fed)
    >>> asked = next(eq.FedAvgServer(setting).round(1, ["site 1", "site 2"]))
    >>> asked.action, asked.sites, list(asked.payload)
    ('train', ('site 1', 'site 2'), ['model'])
    """

    def setup(self) -> None:
        net = self.new_net()
        self.state.model = {name: net.state_dict()[name] for name in self.shared_entries(net)}

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        updates = yield Ask("train", sites, model=self.model_for(sites))
        self.state.model = self.merge(updates, number)

    def model_for(self, sites: Sequence[str]) -> Tensors | PerSite:
        """The model to send: the same to all sites here."""
        model: Tensors = self.state.model
        return model

    def merge(self, updates: Replies, number: int) -> Tensors:
        """The model of the sites' replies: their mean."""
        return average(updates, "model", self.setting.config.train.aggregation)

    def message(self) -> dict[str, Value | PerSite]:
        return {"model": self.state.model}


class FedAvgClient(SharedNet, Client):
    """Trains the received net on the local images.

    >>> sorted(FedAvgClient.discloses["train"])
    ['examples', 'model']
    """

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": {
            "model": averaged("the net's weights and batch-norm statistics after local training"),
            "examples": added(Entry("number of local training images", "images")),
        }
    }

    image_by_image: ClassVar[bool] = True

    def build(self) -> None:
        self.net = self.new_net()
        self.carrier = self.new_carrier()
        self.shared = tuple(self.shared_entries(self.carrier))
        self.receives("model", self.carrier, self.shared)
        self.phase("main", self.net)

    def new_carrier(self) -> nn.Module:
        """The net that travels: the one that trains, here."""
        return self.net

    def train(self, message: Payload) -> Action:
        yield Train()
        return self.update()

    def update(self) -> Payload:
        """The reply of `train`."""
        return {"model": share(self.carrier, self.shared), "examples": self.workplace.examples}

    def forward(self, batch: Batch) -> Any:
        features = self.net.features(batch.image)
        return SimpleNamespace(features=features, logits=self.net.classify(features))

    def loss(self, batch: Batch, out: Any) -> Tensor:
        return self.supervised(out.logits, batch.label)

    def predict(self, view: str, batch: Batch) -> Tensor:
        logits: Tensor = self.outputs(batch).logits
        return logits
