"""Components on a method: two classes that stand over the method's own server and client, and drive their generators.

A method's code does not know which components are on it. Surveys run before its round, entries of components join its
request to train, its local training is cut into epochs where a component wants them, and server steps come after.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.contract.client import Batch, Client, Gradients, PerBatch
from equipoise.contract.component import Component, Message, ServerSide, Sheet, SiteSide
from equipoise.contract.modules import copy_entries
from equipoise.contract.optimiser import Optimiser
from equipoise.contract.protocol import (
    Action,
    Ask,
    Conversation,
    Payload,
    PerSite,
    Replies,
    Reply,
    Sums,
    Tensors,
    Train,
    Value,
    Work,
)
from equipoise.contract.server import Server
from equipoise.contract.setting import Setting
from equipoise.contract.summed import like
from equipoise.contract.workplace import Phase
from equipoise.nets import all_but, entries_of

#: actions of every method, to whose replies components add entries
TRAIN, EPOCH = "train", "epoch"


class Names:
    """How a component's entries, actions and states are called: with its name before them, or plain.

    The components that a method consists of, and those that are `flat`, have plain names. `names` holds exceptions.
    """

    def __init__(self, plain: Iterable[str], names: Mapping[str, str]):
        self._plain, self._names = frozenset(plain), dict(names)

    def of(self, name: str) -> str:
        """What a name of the host itself is called."""
        return self._names.get(name, name)

    def __call__(self, component: Component, name: str) -> str:
        full = f"{component.name}.{name}"
        plain = component.flat or component.name in self._plain
        return self._names.get(full, name if plain else full)


class Composed:
    """What both sides know alike: the components, the net, and which of its entries travel."""

    composition: ClassVar[tuple[Component, ...]] = ()
    names: ClassVar[Names] = Names((), {})
    setting: Setting

    def spaced(self, component: Component, name: str) -> str:
        """What an entry, action or state of a component is called outside it."""
        return self.names(component, name)

    def new_net(self) -> Any:
        """The net in its first state: that of the component which holds the head, or else the method's."""
        for component in self.composition:
            if "head" in component.holds():
                return component.new_net(self.setting)
        make: Callable[[], Any] = getattr(super(), "new_net", self.setting.new_net)
        return make()

    def shared_entries(self, net: nn.Module) -> Iterable[str]:
        """The state-dict names that travel: the method's, without the groups that components keep at the sites."""
        wanted = set(all_but(net, *self.staying()))
        method: Any = super()
        return tuple(entry for entry in method.shared_entries(net) if entry in wanted)

    @classmethod
    def staying(cls) -> tuple[str, ...]:
        """The groups of the net that components keep at the sites."""
        return tuple(dict.fromkeys(group for component in cls.composition for group in component.stays))

    @classmethod
    def by_epoch(cls) -> bool:
        """Whether any component acts between local epochs."""
        return any(component.by_epoch for component in cls.composition)

    @classmethod
    def asks_by_epoch(cls) -> bool:
        """Whether any component exchanges something after each local epoch."""
        return any(component.asks_by_epoch for component in cls.composition)


# ---- the server --------------------------------------------------------------------------------------------


class ComposedServer(Composed, Server):
    """Runs the method's own round, and the components' hooks around its training."""

    def setup(self) -> None:
        super().setup()
        for component in self.composition:
            component.check(self.setting.config)
        self.sides: dict[str, ServerSide] = {c.name: c.Server(c, self) for c in self.composition}
        self._merging = self._holder("merge")
        for side in self.sides.values():
            side.setup()

    def _holder(self, seat: str) -> ServerSide | None:
        return next((side for side in self.sides.values() if seat in side.options.holds()), None)

    def start(self, roster: Sequence[str]) -> Conversation:
        yield from super().start(roster)
        for side in self.sides.values():
            yield from side.start(roster)

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        for side in self.sides.values():
            sites = yield from side.survey(number, sites)
        before: Tensors = self.state.model if "model" in self.state else {}
        updates: Replies | None = None
        inner = super().round(number, sites)
        ask = next(inner)
        while True:
            if ask.action == TRAIN:
                replies = updates = yield from self._trained(ask, number)
            else:
                replies = yield ask
            try:
                ask = inner.send(replies)
            except StopIteration:
                break
        if updates is not None:
            self._step(number, updates, before)

    def _trained(self, ask: Ask, number: int) -> Generator[Ask, Replies, Replies]:
        """The training that the method asks for, with the components' entries; perhaps epoch by epoch."""
        last = self.setting.config.train.epochs - 1 if self.asks_by_epoch() else 0
        payload: Message = dict(ask.payload)
        for epoch in range(last + 1):
            payload |= self.joining(number)
            if any(component.counts_epochs for component in self.composition):
                payload["epoch"] = epoch
            replies = yield Ask(TRAIN if epoch == last else EPOCH, ask.sites, **payload)
            for side in self.sides.values():
                side.exchanged(self.own_entries(side.options, replies), number, epoch, epoch == last)
            payload = {}  # a site goes on with the model that it has
        return replies

    def joining(self, number: int, seat: str = "") -> Message:
        """What components add to a request to train; or only what the holder of a seat adds."""
        found: Message = {}
        for side in self.sides.values():
            if not seat or seat in side.options.holds():
                found |= {self.spaced(side.options, key): value for key, value in side.message(number).items()}
        return found

    def _step(self, number: int, updates: Replies, before: Tensors) -> None:
        model: Tensors = self.state.model if "model" in self.state else {}
        stepped = model
        for side in self.sides.values():
            stepped = side.after(number, self.own_entries(side.options, updates), before, stepped)
        if stepped is not model:
            self.state.model = stepped

    def own_entries(self, component: Component, replies: Replies) -> Replies:
        """Replies whose entries of one component can be read by their own names."""
        if isinstance(replies, Sums):
            return Sums(_OwnEntries(replies.whole, self.names, component), replies.sites, replies.missing)
        found = [Reply(reply.site, _OwnEntries(reply.payload, self.names, component)) for reply in replies]
        return Replies(found, replies.missing)

    # ---- what the method's own round calls, where it is FedAvg's

    def model_for(self, sites: Sequence[str]) -> Any:
        """The model to send."""
        method: Any = super()
        return self._merging.model_for(sites) if self._merging else method.model_for(sites)

    def merge(self, updates: Replies, number: int) -> Tensors:
        """The model of the sites' replies."""
        method: Any = super()
        return self._merging.merge(updates, number) if self._merging else method.merge(updates, number)

    def received(self, sites: Sequence[str]) -> Message:
        """What sites need to use the model that they train on next, before they train."""
        found = super().message()
        if "model" in found:
            found["model"] = self.model_for(sites)
        return found | self._predicting()

    def message(self) -> Message:
        found = super().message()
        if any("carrier" in component.holds() for component in self.composition):
            found.pop("model", None)  # what travels does not predict
        elif "model" in found:
            found["model"] = self._evaluated()
        if self.adapting:
            found |= self.joining(0)
        return found | self._predicting()

    def _evaluated(self) -> Tensors | PerSite:
        """The model that sites predict by."""
        found: Tensors | PerSite = self._merging.evaluated() if self._merging else self.state.model
        for side in self.sides.values():
            if not isinstance(found, PerSite):
                found = side.shown(found)
        return found

    def _predicting(self) -> Message:
        found: Message = {}
        for side in self.sides.values():
            found |= {self.spaced(side.options, key): value for key, value in side.predicting().items()}
        return found

    #: whether sites fine-tune personal models before these are evaluated
    adapting: ClassVar[bool] = False


class _OwnEntries(Mapping[str, Any]):
    """A reply's payload under the names that one component uses; the method's entries keep theirs."""

    def __init__(self, payload: Mapping[str, Value], names: Names, component: Component):
        self._payload, self._names, self._component = payload, names, component

    def __getitem__(self, name: str) -> Any:
        full = self._names(self._component, name)
        return self._payload[full if full in self._payload else name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._payload)

    def __len__(self) -> int:
        return len(self._payload)


# ---- a site ------------------------------------------------------------------------------------------------


class ComposedClient(Composed, Client):
    """The client of a method, with components at its hooks."""

    #: the client of the method itself
    method_client: ClassVar[type[Client]]
    #: the method's: the net that trains, the one that travels, and which of its entries do
    net: Any
    carrier: Any
    shared: tuple[str, ...]

    def build(self) -> None:
        self.sides: dict[str, SiteSide] = {c.name: c.Site(c, self) for c in self.composition}
        self._extended = False
        self.asked_epoch = False
        self._head = self._holder("head")
        self._loss = self._holder("loss")
        self._draws = self._holder("draws")
        self._carrier = self._holder("carrier")
        place = self.workplace
        place.holders += self.sides.values()
        place.ready, place.after_step, place.head_gives_logits = self._renew, self._after_step, self._head is None
        if self._draws:
            place.order = self._draws.order
        super().build()
        if groups := self.staying():
            carrier = getattr(self, "carrier", self.net)
            self.keeps(self.names.of("stays"), carrier, entries_of(carrier, *groups))
        for side in self.sides.values():
            side.build()
        if self.asks_by_epoch():
            self.parked = self.keeps("parked", self.reference(self.new_net()))

    def _holder(self, seat: str) -> SiteSide | None:
        return next((side for side in self.sides.values() if seat in side.options.holds()), None)

    def new_carrier(self) -> nn.Module:
        """The net that travels."""
        method: Any = super()
        return self._carrier.carrier() if self._carrier else method.new_carrier()

    def extend_training(self, name: str, module: nn.Module, apart: bool = False, first: str = "net") -> None:
        """Let a further module train in the main phase: beside the net, or as a model that is clipped by itself.

        The parameters that trained before are named after the model `first`, unless they belong to models already.
        """
        phase = self.workplace.phases["main"]
        old = phase.optimiser
        plain = not any(old.models) and not self._extended
        names = [f"{first}.{key}" for key in old.names] if plain else old.names
        models = [first] * len(names) if plain and apart else old.models
        more = [(f"{name}.{key}", parameter) for key, parameter in module.named_parameters()]
        parameters: list[Any] = [*zip(names, old.parameters, strict=True), *more]
        owners = [*models, *([name if apart else models[0]] * len(more))]
        self._extended = True
        per_class = self.workplace.class_rows(module)
        rows = {len(names) + place for place, (key, _) in enumerate(module.named_parameters()) if key in per_class}
        made = Optimiser(parameters, old.config, owners, old.rows | rows, self.class_counts)
        self.workplace.add_phase("main", Phase(made, phase.norm, phase.scheduled))

    # ---- actions -----------------------------------------------------------------------------------

    def train(self, message: Payload) -> Action:
        first = message.get("epoch", 0)
        yield from self._begin(message, first)
        inner, result = super().train(message), None
        while True:
            try:
                work = inner.send(result)
            except StopIteration as stop:
                reply = stop.value
                break
            if isinstance(work, Train) and work.phase == "main":
                result = yield from self._epochs(work, first)
            else:
                result = yield work
        return {**reply, **(yield from self._replies(self.sides.values()))}

    def epoch(self, message: Payload) -> Action:
        """One local epoch of a round, after which components exchange something; the net waits for the next."""
        first = message["epoch"]
        self.asked_epoch = True
        yield from self._begin(message, first)
        yield from self._epochs(Train(), first, 1)
        copy_entries(self.carrier, self.parked, self.shared)
        return (yield from self._replies(side for side in self.sides.values() if side.options.asks_by_epoch))

    def _begin(self, message: Payload, first: Any) -> Generator[Work, Any, None]:
        """Before a round's first epoch; before a later one, the net goes on as it was left."""
        if first:
            copy_entries(self.parked, self.carrier, self.shared)
            return
        for side in self.sides.values():
            yield from side.begin(message)

    def _epochs(self, work: Train, first: Any, most: int | None = None) -> Generator[Work, Any, Any]:
        """The method's local training, cut into epochs where a component acts between them."""
        if not self.by_epoch():
            return (yield work)
        epochs = self.setting.config.train.epochs if work.epochs is None else work.epochs
        end = epochs if most is None else min(first + most, epochs)
        for epoch in range(first, end):
            for side in self.sides.values():
                side.before_epoch()
            yield Train(epochs=1, first_epoch=epoch)
            for side in self.sides.values():
                yield from side.after_epoch(epoch + 1 == epochs)
        return None

    def _replies(self, sides: Iterable[SiteSide]) -> Generator[Work, Any, Payload]:
        found: Payload = {}
        for side in sides:
            own = yield from side.reply()
            found |= {self.spaced(side.options, key): value for key, value in own.items()}
        return found

    def adapt(self) -> Generator[Work, Any, None]:
        if adapts(self.method_client):
            for side in self.sides.values():
                yield from side.begin_adapting()
        yield from super().adapt()
        yield from self._renew()

    def _renew(self) -> Generator[Work, Any, None]:
        for side in self.sides.values():
            if side.options.adapts:
                yield from side.adapt()

    # ---- hooks of the step ---------------------------------------------------------------------------

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        found = dict(super().prepare(chunk))
        for side in self.sides.values():
            found |= side.prepare(chunk)
        return found

    def forward(self, batch: Batch) -> Any:
        """The method's outputs; where components bring images, the net sees these in the same pass."""
        more = {name: images for name, side in self.sides.items() if (images := side.images(batch)) is not None}
        out = self._joint(batch, more) if more else super().forward(batch)
        if self._head is not None:
            out.output = out.logits
            del out.logits
        for side in self.sides.values():
            side.forward(batch, out)
        return out

    def _joint(self, batch: Batch, more: Mapping[str, Tensor]) -> Any:
        """Features of all images at once, and logits of the batch's and of those that have labels."""
        features = self.net.features(torch.cat([batch.image, *more.values()]))
        first, start, pieces = features[: len(batch.image)], len(batch.image), {}
        for name, images in more.items():
            pieces[name] = features[start : start + len(images)]
            start += len(images)
        labelled = [pieces[name] for name in more if self.sides[name].labels(batch) is not None]
        shown = first
        if labelled:
            shown = features if len(labelled) == len(more) else torch.cat([first, *labelled])
        return SimpleNamespace(features=first, logits=self.net.classify(shown), pieces=pieces, joint=features)

    def outputs(self, batch: Batch) -> Any:
        """The forward pass in the configured precision; `all_logits` are of images from elsewhere, too."""
        out = super().outputs(batch)
        if self._head is not None:
            out.logits = self._head.classify(out.output)
        if hasattr(out, "pieces"):
            out.all_logits = out.logits
            out.logits = out.logits[: len(batch.image)]
        return out

    def classified(self, output: Tensor) -> Tensor:
        """Logits (B, C) of what a net like this one puts out."""
        return self._head.classify(output) if self._head else output

    def all_labels(self, batch: Batch) -> Tensor:
        """The labels of the batch, and of the images that components bring."""
        found = [labels for side in self.sides.values() if (labels := side.labels(batch)) is not None]
        return torch.cat([batch.label, *found]) if found else batch.label

    def prepare_loss(self) -> Generator[Work, Any, None]:
        """Fill what the supervised loss needs, for an action that measures it without training."""
        if self._loss:
            yield from self._loss.begin({})

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        for side in self.sides.values():
            logits = side.logits(logits)
        return self._loss.supervised(logits, labels) if self._loss else super().supervised(logits, labels)

    def loss(self, batch: Batch, out: Any) -> Tensor:
        for side in self.sides.values():
            if side.options.sole_loss:
                return side.loss(batch, out, torch.zeros((), device=self.setting.device))
        loss = self._of_all_images(batch, out)
        for side in self.sides.values():
            loss = side.loss(batch, out, loss)
        with torch.no_grad():
            for side in self.sides.values():
                side.seen(batch, out)
        return loss

    def _of_all_images(self, batch: Batch, out: Any) -> Tensor:
        """The method's loss; with images that components bring, one mean over these and the site's own.

        The site's class counts, which the supervised loss may use, do not hold for images from elsewhere.
        """
        labels = self.all_labels(batch)
        if len(labels) == len(batch.label):
            return super().loss(batch, out)
        changed = any(type(side).logits is not SiteSide.logits for side in self.sides.values())
        if self._head is not None and self._loss is None and not changed:  # FedBM's: one cross entropy of all
            return super().supervised(out.all_logits, labels)
        sizes = [len(batch.label), len(labels) - len(batch.label)]
        own, others = out.all_logits.split(sizes)
        elsewhere = labels[sizes[0] :]
        losses = self.supervised(own, batch.label), nn.functional.cross_entropy(others, elsewhere)
        return (sizes[0] * losses[0] + sizes[1] * losses[1]) / sum(sizes)

    def adjust(self, gradients: Gradients) -> Gradients:
        gradients = super().adjust(gradients)
        for side in self.sides.values():
            gradients = side.adjust(gradients)
        return gradients

    def _after_step(self) -> None:
        for side in self.sides.values():
            side.after_step()

    def predict(self, view: str, batch: Batch) -> Tensor:
        for side in reversed(self.sides.values()):
            if side.predicts(view):
                return side.predict(view, batch)
        return super().predict(view, batch)


def adapts(client: type[Client]) -> bool:
    """Whether sites change their personal model before it is evaluated."""
    own: type[Client] = getattr(client, "method_client", client)
    renewed = any(component.adapts for component in getattr(client, "composition", ()))
    return renewed or own.adapt is not Client.adapt


# ---- putting both together -----------------------------------------------------------------------------------


def composed_client(
    client: type[Client], components: Sequence[Component], own: Iterable[str], names: Mapping[str, str]
) -> type[Client]:
    """A method's client with components on it; `own` names those that the method consists of."""
    if not components:
        return client
    called = Names(own, names)
    views = client.views
    for component in components:
        views = component.views(views)
    body: dict[str, Any] = {
        "__doc__": client.__doc__,
        "composition": tuple(components),
        "names": called,
        "method_client": client,
        "discloses": _sheet(client, components, called),
        "views": views,
    }
    for component in components:
        for action in component.discloses().keys() - {TRAIN, EPOCH}:
            body[called(component, action)] = _action(component.name, action)
    return type(f"{client.__name__}With{len(components)}", (ComposedClient, client), body)


def composed_server(
    server: type[Server],
    client: type[Client],
    components: Sequence[Component],
    own: Iterable[str],
    names: Mapping[str, str],
) -> type[Server]:
    """A method's server with components on it."""
    if not components:
        return server
    body = {
        "__doc__": server.__doc__,
        "composition": tuple(components),
        "names": Names(own, names),
        "adapting": adapts(client),
    }
    return type(f"{server.__name__}With{len(components)}", (ComposedServer, server), body)


def sheet_of(
    client: type[Client], components: Sequence[Component], own: Iterable[str], names: Mapping[str, str]
) -> Sheet:
    """What leaves a site through a client with components on it."""
    return _sheet(client, components, Names(own, names))


def _sheet(client: type[Client], components: Sequence[Component], names: Names) -> Sheet:
    sheet = {action: dict(entries) for action, entries in client.discloses.items()}
    staying = [group for component in components for group in component.stays]
    if staying and "model" in sheet.get(TRAIN, {}):
        kept = {"norm": "norm layers", "statistics": "running statistics", "head": "the classifier"}
        without = " and ".join(kept.get(group, group) for group in dict.fromkeys(staying))
        text = f"the net's weights after local training, without {without}"
        sheet[TRAIN]["model"] = like(text, sheet[TRAIN]["model"])
    for component in components:
        for action, entries in component.discloses().items():
            if action in (TRAIN, EPOCH):
                called = {names(component, entry): text for entry, text in entries.items()}
                sheet[action] = sheet.get(action, {}) | called
            else:
                sheet[names(component, action)] = dict(entries)
    return sheet


def _action(component: str, action: str) -> Any:
    """The client's method that performs a component's action."""

    def perform(client: ComposedClient, message: Payload) -> Any:
        return getattr(client.sides[component], action)(message)

    return perform
