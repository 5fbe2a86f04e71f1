"""What happens at a site: one request is performed, from the message to the reply. Every engine uses this."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise.contract.bulk import clone_all
from equipoise.contract.disclosed import held_back, shown
from equipoise.contract.method import Client
from equipoise.contract.notes import Notes, Values
from equipoise.contract.protocol import (
    Diverged,
    Evaluate,
    Scan,
    Soundness,
    Tensors,
    Train,
    Value,
    Work,
    check_payload,
    flatten,
    unflatten,
)
from equipoise.data.augment import Augmentation
from equipoise.data.federation import Split
from equipoise.engine.private import PrivateSite
from equipoise.engine.training import (
    EagerSteps,
    Progress,
    SiteData,
    Steps,
    amount,
    evaluate,
    observed,
    scan,
    train,
)

EVALUATE = "evaluate"
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One action at one site.

    Args:
        index: position of the ask in its round; a site's draws differ from ask to ask
        measure: parts on which to measure models: after the action, or as the whole of an evaluation
        views: models to measure: global, personal
        scores: whether to send each image's scores along, which stay within one machine
        data: the place whose images models are measured on, if not the site's own
    """

    action: str
    site: str
    round: int
    index: int = 0
    measure: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    scores: bool = False
    data: str = ""


@dataclass
class Outcome:
    """What came of a request. `kept` is the site's next state, None where nothing is kept or changed."""

    payload: Mapping[str, Value] = field(default_factory=dict)
    kept: Tensors | None = None
    measures: dict[str, Tensors] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Values] = field(default_factory=dict)


class Slot:
    """A workplace: one client object that serves site after site."""

    def __init__(self, client: Client, augmentation: Augmentation, run_step: Steps | None = None):
        self.client = client
        self.augmentation = augmentation
        self.run_step = run_step or EagerSteps()
        self._loss_sum = torch.zeros((), device=client.setting.device)
        self.private = None if client.workplace.private is None else PrivateSite(client.setting)

    def perform(
        self,
        request: Request,
        message: Mapping[str, Value],
        kept: Mapping[str, Tensor] | None,
        data: SiteData,
        elsewhere: SiteData | None = None,
    ) -> Generator[None, None, Outcome]:
        """Perform a request; yields after each training step, and returns the outcome.

        The site trains and adapts on its own `data`; models are measured there too, unless `elsewhere` is given.
        """
        client, place, began = self.client, self.client.workplace, time.perf_counter()
        self._index, self._work, self._trainings = request.index, 0, 0
        self._progress = Progress(self._loss_sum.zero_())
        place.begin(message, kept)
        place.site, place.round = request.site, request.round
        place.occasion = ("evaluation",) if request.action == EVALUATE else ()
        client.class_counts.copy_(data.class_counts)
        if self.private is not None:
            self.private.begin(client, request.site, request.round, request.index)
        factor = client.setting.config.train.schedule.factor(max(request.round - 1, 0))
        for phase in place.phases.values():
            phase.optimiser.lr.fill_(phase.optimiser.config.lr * (factor if phase.scheduled else 1.0))
        try:
            if request.action == EVALUATE:
                outcome = Outcome(measures=(yield from self._measure(request, data, elsewhere or data, adapt=True)))
            else:
                action = getattr(client, request.action)(dict(message))
                payload = (yield from self._drive(action, data)) if isinstance(action, Generator) else action
                outcome = self._outcome(request, payload)
                soundness = Soundness(outcome.kept or {})
                if request.measure:
                    yield from self._drive(place.ready(), data)
                outcome.measures = yield from self._measure(request, data, data, adapt=False)
                yield from self._settle()
                if entry := soundness.first_unfinite():
                    what = f"'{entry.rstrip('/')}', which the site keeps,"
                    raise Diverged(f"{request.action}: {what} holds NaN or infinity")
                outcome.facts |= self._facts() if self.private is None else {}
                outcome.notes = place.notes.taken() if self.private is None else {}
        finally:
            place.end()
            place.notes = Notes()
        outcome.facts["seconds"] = time.perf_counter() - began
        return outcome

    def _outcome(self, request: Request, payload: Any) -> Outcome:
        """Copies of the reply, whose entries the disclosure sheet must name, and of the site's next state."""
        client = self.client
        where = f"{type(client).__name__}.{request.action}"
        check_payload(payload, where)
        undeclared = payload.keys() - client.discloses.get(request.action, {}).keys()
        if undeclared:
            raise TypeError(f"{where} replies '{min(undeclared)}', which its disclosure sheet does not name")
        entries, least = client.discloses.get(request.action, {}), client.setting.config.privacy.limit
        tensors, plain = flatten(held_back(payload, entries, client.class_counts, least))
        return Outcome(unflatten(cloned(tensors), plain), cloned(client.workplace.kept()) or None)

    def _facts(self) -> dict[str, float]:
        """What the site tells of its training; images of classes that it holds back are not counted."""
        facts, least = self._progress.facts(), self.client.setting.config.privacy.limit
        if least > 1 and "examples" in facts:
            counts = self.client.class_counts
            facts["examples"] = round(facts["examples"] * float(shown(counts, least).sum() / counts.sum()))
        return facts

    def _drive(self, action: Generator[Work, Any, Any], data: SiteData) -> Generator[None, None, Any]:
        """Do each piece of work that a client's generator yields, and send it the result; returns what it returns."""
        client, result = self.client, None
        while True:
            try:
                work = action.send(result)
            except StopIteration as stop:
                return stop.value
            result = None
            if isinstance(work, Train) and 0 in amount(work, client.setting.config.train):
                continue  # and it takes no random stream: later work draws as if it had not been yielded
            self._work += 1
            if isinstance(work, Train):
                # Other work does not count: looking up statistics before training leaves its dropout masks unchanged.
                self.run_step.seed(client.workplace.stream("dropout", self._index, self._trainings))
                self._trainings += 1
                yield from train(client, data["train"], self.augmentation, work, self._progress, self.run_step)
            else:
                result = self._looked_up(work, data)
            yield from self._settle()

    def _looked_up(self, work: Any, data: SiteData) -> Any:
        """The result of work that changes no model."""
        which = self._index, self._work
        if isinstance(work, Scan):
            return scan(self.client, data[work.part], self.augmentation, work, *which)
        if isinstance(work, Evaluate):
            return evaluate(self.client, data, self.augmentation, work, *which)
        raise TypeError(f"{type(self.client).__name__} yielded {work!r}, which is no work")

    def _settle(self) -> Generator[None, None, None]:
        """Let other slots work until this one's results are there: reading them then stalls no slot."""
        if self.client.setting.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            while not done.query():
                yield

    def _measure(
        self, request: Request, data: SiteData, measured: SiteData, adapt: bool
    ) -> Generator[None, None, dict[str, Tensors]]:
        """Counts of the asked views on the asked parts, by `view.part`; the global model before any adaptation."""
        client, measures = self.client, {}
        for view in request.views:
            if view == "personal" and adapt:
                yield from self._drive(client.adapt(), data)
            for part in request.measure:
                if measured.has(part):
                    seen = observed(client, measured[part], self.augmentation, view)
                    yield from self._settle()
                    split = measured[part].split
                    if counts := self.counted(request, view, part, seen, split):
                        measures[f"{view}.{part}"] = counts
        return measures

    def counted(self, request: Request, view: str, part: str, seen: Tensors, split: Split) -> Tensors:
        """The counts of a part's predictions, as far as privacy allows; with each image's `scores` if requested."""
        task, least = self.client.setting.task, self.client.setting.config.privacy.limit
        if least > 1:
            told = task.told(split, least)
            if not told.any():
                return {}
            where = torch.from_numpy(told).to(self.client.setting.device)
            seen = {name: rows[where.to(rows.device)] for name, rows in seen.items()}
            split = replace(split, rows=split.rows[told], labels=split.labels[told])
        counts = task.count(seen, split, request.scores)
        counts = task.merged(counts, least) if least > 1 else counts
        return counts if self.private is None else self.private.measured(counts, request, view, part)


def cloned(tensors: Tensors) -> Tensors:
    """Copies that outlive what happens to the originals."""
    return dict(zip(tensors, clone_all([tensor.detach() for tensor in tensors.values()])))


def exhaust(work: Generator[None, None, T]) -> T:
    """Run a request, or several, to the end at once."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value
