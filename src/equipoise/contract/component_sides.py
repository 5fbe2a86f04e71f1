"""The two sides of a component: one at every site, one on the server."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise.contract.client import Batch, Gradients, PerBatch
from equipoise.contract.protocol import Ask, Conversation, Payload, PerSite, Replies, Tensors, Value, Work
from equipoise.contract.setting import Setting

if TYPE_CHECKING:
    from equipoise.contract.composed_client import ComposedClient
    from equipoise.contract.composed_server import ComposedServer

Message = dict[str, Value | PerSite]


class SiteSide:
    """A component's side at a site. Its tensors are declared under the component's name.

    >>> import equipoise as eq
    >>> class Site(eq.SiteSide):
    ...     def loss(self, batch, out, loss):
    ...         return loss + self.options.weight * out.logits.square().mean()
    """

    def __init__(self, options: Any, client: ComposedClient):
        self.options = options
        self.client = client
        self.setting: Setting = client.setting
        self.num_classes = client.num_classes

    @property
    def class_counts(self) -> Tensor:
        """Number of local training images (C,) of each class."""
        counts: Tensor = self.client.class_counts
        return counts

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

    def note(self, name: str, value: Tensor | float) -> None:
        """Write down how the component acts here, outside of steps: a number, or a tensor of classes (C, ...)."""
        self.client.workplace.notes.add(f"{self.options.name}.{name}", value)

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

    def supervising(self, loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """The supervised loss with this component's term in it, of every net that learns from labels."""
        return loss

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
        """Logits of a view where `predicts` asks for it."""
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
    """A component's side on the server. `state` is what survives a resume, under the component's name.

    >>> import equipoise as eq
    >>> class Slow(eq.ServerSide):
    ...     def after(self, number, updates, before, model):
    ...         return {name: before[name].lerp(new, 0.5) if new.is_floating_point() else new
    ...                 for name, new in model.items()}
    """

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

    def note(self, name: str, value: Tensor | float, site: str = "") -> None:
        """Write down how the component acts on the server: a number, or a tensor of classes (C, ...); of a site."""
        self.server.note(f"{self.options.name}.{name}", value, site)

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

    def finish(self, number: int, sites: Sequence[str]) -> Conversation:
        """At the end of a round: ask the sites that trained about the model that the round leaves."""
        yield from ()

    def shown(self, model: Tensors) -> Tensors:
        """The model that is evaluated, if not the one that is trained on."""
        return model
