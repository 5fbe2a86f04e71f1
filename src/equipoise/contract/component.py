"""A component is one idea of a paper that can be put on any method.

It has options, a side at every site and a side on the server. It names the seat that it holds, what it needs of its
method, and what it takes away. `equipoise.contract.composition` puts components on a method.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin

import torch
from torch import Tensor, nn

from equipoise.contract.client import Batch, Gradients, PerBatch
from equipoise.contract.config import Config
from equipoise.contract.protocol import Ask, Conversation, Payload, PerSite, Replies, Tensors, Value, Work
from equipoise.contract.setting import Setting
from equipoise.core.table import Table

if TYPE_CHECKING:
    from equipoise.contract.composition import ComposedClient, ComposedServer

#: {action: {entry: what it is}}: what leaves a site
Sheet = dict[str, dict[str, str]]
Message = dict[str, Value | PerSite]

#: what one component, or the method itself, decides alone
SEATS: Mapping[str, str] = {
    "head": "the net's last layers",
    "loss": "the supervised loss",
    "carrier": "the net that travels",
    "merge": "how the server merges models",
    "draws": "which images an epoch draws",
    "predict": "how a model predicts",
}

#: what a method grants unless it says otherwise, or a component takes it away
WORDS: Mapping[str, str] = {
    "model": "a model on the server",
    "whole model": "that the whole net travels",
    "class head": "a linear head that travels, with one row for each class",
    "head predicts": "that the head which the server sends predicts",
    "one model": "that all sites receive the same model",
    "plain forward": "one net that trains, whose features give its logits",
    "plain features": "features of the net that trains among the outputs of its forward pass",
    "plain loss": "that the supervised loss of the net's logits is the whole loss of the method",
    "net trains": "that the net which the site receives is the one that trains",
    "one loss": "one loss for each step of training",
    "one training ask": "that the server asks a site once in a round to train",
    "local epochs": "training by whole epochs",
    "supervised": "a supervised loss of logits",
    "sites": "several sites, each with images of its own",
    "absent classes": "that the loss trains the weights of classes which a site lacks",
    "all classes": "a loss in which classes that a site lacks compete",
}
GRANTED = frozenset(WORDS)


class Options(Table):
    """The options of a method. They also say what the method is made of under these options."""

    #: options that make the method what it is: that one has no effect is told even at its default
    distinctive: ClassVar[tuple[str, ...]] = ()
    #: settings, as for `--set`, under which a run of few rounds reaches all that it does, at the usual cost of a round
    in_short: ClassVar[tuple[str, ...]] = ()
    #: further settings under which all that costs little, where results do not matter
    at_little_cost: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def switches(cls) -> dict[str, tuple[Any, ...]]:
        """The options that take one of a few values, and these values."""
        found: dict[str, tuple[Any, ...]] = {}
        for name, field in cls.model_fields.items():
            if field.annotation is bool:
                found[name] = (False, True)
            elif get_origin(field.annotation) is Literal:
                found[name] = get_args(field.annotation)
        return found

    def components(self) -> Sequence[Component]:
        """The components that the method consists of, besides its own server and client."""
        return ()

    def holds(self) -> AbstractSet[str]:
        """The seats that the method's own code holds; `train.loss`: it has a loss unless a component brings one."""
        return frozenset()

    def lacks(self) -> AbstractSet[str]:
        """The words that do not hold with it."""
        return frozenset()

    def single_replies(self) -> str:
        """Why its server has to read what each site sent, in words; empty: sums over sites are enough."""
        return ""

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        """Options, or dotted keys of the config, that do nothing under this setting, and why."""
        return {}


class Component(Options):
    """A component with its options; an instance is what a run uses.

    Attributes:
        name: how users name it, and the prefix of its entries, actions and states
        paper: where the idea comes from
        stays: groups of the net (body, head, norm, statistics) that stay at the sites
        rank: components act in this order, whatever order the user lists them in
        flat: its entries and states carry no prefix
        counts_epochs: sites are told which local epoch of the round comes next
        defaults: config values that choosing it implies, unless the user sets them
        limit: options under which it changes no bit of a method that trains by plain cross entropy and weighs sites by
            size; empty where it has no such limit
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    stays: ClassVar[tuple[str, ...]] = ()
    rank: ClassVar[int] = 50
    flat: ClassVar[bool] = False
    counts_epochs: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}
    limit: ClassVar[Mapping[str, Any]] = {}
    Site: ClassVar[type[SiteSide]]
    Server: ClassVar[type[ServerSide]]

    def needs(self) -> AbstractSet[str]:
        """Words that the method must grant, or another component must give."""
        return frozenset()

    def gives(self) -> AbstractSet[str]:
        """Words that other components may need."""
        return frozenset()

    def discloses(self) -> Sheet:
        """What leaves a site because of this component, under these options."""
        return {}

    def single_replies(self) -> str:  # a component that merges by sums says so
        return "it merges what sites send in its own way" if "merge" in self.holds() else ""

    def views(self, views: tuple[str, ...]) -> tuple[str, ...]:
        """The models that can be measured, of those that the method has."""
        return ("personal",) if self.stays else views

    def new_net(self, setting: Setting) -> Any:
        """The net, where this component holds the head; the same at first on the server and at every site."""
        raise NotImplementedError

    def check(self, config: Config) -> None:
        """Refuse settings under which the component cannot work."""

    @property
    def by_epoch(self) -> bool:
        """Whether a site acts between its local epochs."""
        return False

    @property
    def asks_by_epoch(self) -> bool:
        """Whether sites and server exchange something after each local epoch."""
        return False

    @property
    def sole_loss(self) -> bool:
        """Whether this component's loss is all that a step minimises: nothing else of the loss is computed."""
        return False

    @property
    def adapts(self) -> bool:
        """Whether a site changes what it predicts by before each evaluation."""
        return False


def variations(options: type[Any]) -> list[Any]:
    """The default options, and each of them with one switch turned."""
    usual = options()
    found = [usual]
    for name, values in options.switches().items():
        for value in values:
            if value != getattr(usual, name):
                found.append(usual.model_copy(update={name: value}))
    return found


class SiteSide:
    """A component's side at a site. Its tensors are declared under the component's name."""

    def __init__(self, options: Any, client: ComposedClient):
        self.options = options
        self.client = client
        self.setting: Setting = client.setting
        self.num_classes = client.num_classes

    @property
    def class_counts(self) -> Tensor:
        """Number of local training images (C,) of each class."""
        return self.client.class_counts

    def side(self, name: str) -> Any:
        """The side of another component at this site; None where it is not there."""
        return self.client.sides.get(name)

    # ---- declarations, used in build() ---------------------------------------------------------

    def keeps(self, name: str, target: Any, entries: Iterable[str] | None = None) -> Any:
        """As `Client.keeps`, under the component's name."""
        return self.client.keeps(self.client.spaced(self.options, name), target, entries)

    def receives(self, name: str, target: Any, entries: Iterable[str] | None = None) -> Any:
        """As `Client.receives`, under the component's name."""
        return self.client.receives(self.client.spaced(self.options, name), target, entries)

    def scratch(self, name: str, target: Any, entries: Iterable[str] | None = None) -> Any:
        """As `Client.scratch`, under the component's name."""
        return self.client.scratch(self.client.spaced(self.options, name), target, entries)

    def trains_beside(self, module: nn.Module) -> None:
        """The module trains with the net, and gradients of both are clipped together."""
        self.client.extend_training(self.options.name, module)

    def trains_apart(self, name: str, module: nn.Module, first: str = "net") -> None:
        """The module trains as a model with a name, clipped by its own norm; `first` names the client's net."""
        self.client.extend_training(name, module, apart=True, first=first)

    def build(self) -> None:
        """Declare every tensor that hooks read; the client's own net is there already."""

    # ---- one ask -----------------------------------------------------------------------------------

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        """Before training, with the received model in place."""
        yield from ()

    def begin_adapting(self) -> Generator[Work, Any, None]:
        """Before a personal model is fine-tuned to be evaluated: what its loss needs. As a rule, what training does."""
        yield from self.begin({})

    def adapt(self) -> Generator[Work, Any, None]:
        """Renew what prediction needs before an evaluation; only where the component `adapts`."""
        yield from ()

    def before_epoch(self) -> None:
        """Before each local epoch, where the component acts by epoch."""

    def after_epoch(self, last: bool) -> Generator[Work, Any, None]:
        """After each local epoch, where the component acts by epoch."""
        yield from ()

    def reply(self) -> Generator[Work, Any, Payload]:
        """After training; what it returns leaves the site under the component's name."""
        yield from ()
        return {}

    # ---- hooks of the step: tensors in, tensors out, no host sync -----------------------------------

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        """Fields to add to a large chunk of batches."""
        return {}

    def images(self, batch: Batch) -> Tensor | None:
        """Further images that share the net's forward pass with the batch."""
        return None

    def labels(self, batch: Batch) -> Tensor | None:
        """Labels of these images, where they are to be classified too."""
        return None

    def forward(self, batch: Batch, out: Any) -> None:
        """Add to the outputs of the forward pass."""

    def logits(self, logits: Tensor) -> Tensor:
        """Change logits before the supervised loss sees them."""
        return logits

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The supervised loss, where this component holds the seat."""
        raise NotImplementedError

    def loss(self, batch: Batch, out: Any, loss: Tensor) -> Tensor:
        """The loss with this component's term in it."""
        return loss

    def seen(self, batch: Batch, out: Any) -> None:
        """Count features or predictions, once a step, without gradients."""

    def adjust(self, gradients: Gradients) -> Gradients:
        """Change gradients before the optimiser sees them."""
        return gradients

    def after_step(self) -> None:
        """Act after the parameters have moved."""

    # ---- seats -------------------------------------------------------------------------------------

    def carrier(self) -> nn.Module:
        """Seat carrier: the net that travels in place of the client's."""
        raise NotImplementedError

    def classify(self, output: Tensor) -> Tensor:
        """Seat head: float32 logits (B, C) of the net's output."""
        return output

    def order(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Seat draws: the samples of one epoch, in order."""
        raise NotImplementedError

    def predict(self, view: str, batch: Batch) -> Tensor:
        """Logits of a view where `predicts` says so."""
        raise NotImplementedError

    def predicts(self, view: str) -> bool:
        """Whether this component predicts this view, in place of the method."""
        return "predict" in self.options.holds()


class _Named:
    """The server's state under a component's name."""

    def __init__(self, state: Any, spaced: Any):
        object.__setattr__(self, "_at", (state, spaced))

    def __getattr__(self, key: str) -> Any:
        state, spaced = object.__getattribute__(self, "_at")
        return getattr(state, spaced(key))

    def __setattr__(self, key: str, value: Value) -> None:
        state, spaced = object.__getattribute__(self, "_at")
        setattr(state, spaced(key), value)

    def __contains__(self, key: str) -> bool:
        state, spaced = object.__getattribute__(self, "_at")
        return spaced(key) in state


class ServerSide:
    """A component's side on the server. `state` is what survives a resume, under the component's name."""

    def __init__(self, options: Any, server: ComposedServer):
        self.options = options
        self.server = server
        self.setting: Setting = server.setting
        self.weighting = self.setting.config.train.aggregation
        self.state: Any = _Named(server.state, lambda key: server.spaced(options, key))

    def side(self, name: str) -> Any:
        """Another component's side on the server; None where it is not there."""
        return self.server.sides.get(name)

    def ask(self, action: str, sites: Sequence[str], **payload: Value | PerSite) -> Ask:
        """A request for one of the component's own actions."""
        return Ask(self.server.spaced(self.options, action), sites, **payload)

    def values(self, replies: Replies, entry: str) -> Replies:
        """The replies, whose entries of this component can be read by their own names."""
        return self.server.own_entries(self.options, replies)

    def random(self, purpose: str, number: int) -> torch.Generator:
        """A generator of the server's own for this purpose and round."""
        return self.server.random(purpose, number)

    def setup(self) -> None:
        """Set the first state."""

    def start(self, roster: Sequence[str]) -> Conversation:
        """Gather once what must be known before the first round."""
        yield from ()

    def survey(self, number: int, sites: Sequence[str]) -> Generator[Ask, Replies, Sequence[str]]:
        """Before a round's training; gives the sites that go on."""
        yield from ()
        return sites

    def message(self, number: int) -> Message:
        """What sites receive with training, and before personal models are fine-tuned to be evaluated."""
        return {}

    def predicting(self) -> Message:
        """What sites receive with every evaluation."""
        return {}

    def exchanged(self, replies: Replies, number: int, epoch: int, last: bool) -> None:
        """After an ask to train; there are several in a round where a component `asks_by_epoch`."""

    def model_for(self, sites: Sequence[str]) -> Tensors | PerSite:
        """Seat merge: the model to send."""
        model: Tensors = self.server.state.model
        return model

    def merge(self, updates: Replies, number: int) -> Tensors:
        """Seat merge: the model of the sites' replies."""
        raise NotImplementedError

    def evaluated(self) -> Tensors | PerSite:
        """Seat merge: the models that all sites predict by."""
        model: Tensors = self.server.state.model
        return model

    def after(self, number: int, updates: Replies, before: Tensors, model: Tensors) -> Tensors:
        """A server step: the model that the next round starts from, where the sites' mean is `model`."""
        return model

    def shown(self, model: Tensors) -> Tensors:
        """The model that is evaluated, if not the one that is trained on."""
        return model


Component.Site = SiteSide
Component.Server = ServerSide
