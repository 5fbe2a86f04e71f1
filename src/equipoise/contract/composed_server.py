"""A method's server with components on it: the method's own round, and the components' hooks around its training."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from equipoise.contract.component import Component
from equipoise.contract.component_sides import Message, ServerSide
from equipoise.contract.composed import EPOCH, TRAIN, Composed, Names
from equipoise.contract.protocol import Ask, Conversation, PerSite, Replies, Reply, Sums, Tensors, Value
from equipoise.contract.server import Server


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
            for side in self.sides.values():
                yield from side.finish(number, updates.sites)

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
