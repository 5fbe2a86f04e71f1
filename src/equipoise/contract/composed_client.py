"""A method's client with components on it: their hooks stand around the method's own actions and steps."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.contract.client import Batch, Client, Gradients, PerBatch
from equipoise.contract.component_sides import SiteSide
from equipoise.contract.composed import Composed
from equipoise.contract.modules import copy_entries
from equipoise.contract.optimiser import Optimiser
from equipoise.contract.protocol import Action, Payload, Train, Work
from equipoise.contract.workplace import Phase
from equipoise.nets import entries_of


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
        """Before a round's first epoch; before a later one, the net goes on unchanged."""
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
        loss = self._loss.supervised(logits, labels) if self._loss else super().supervised(logits, labels)
        for side in self.sides.values():
            loss = side.supervising(loss, logits, labels)
        return loss

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
