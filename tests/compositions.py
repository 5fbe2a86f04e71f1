"""Methods with components on them, two rounds in this process: what a composition changes and what leaves its sites."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from equipoise.components import component_names, get_component
from equipoise.contract.config import Config
from equipoise.contract.method import Setting
from equipoise.contract.protocol import Ask, Conversation, Replies, flatten
from equipoise.contract.words import GRANTED
from equipoise.data import Federation
from equipoise.engine.evaluation import Evaluator
from equipoise.engine.local_engine import LocalEngine
from equipoise.methods import get_method
from harness import tiny_config, tiny_federation

#: few images of few pixels: what is asked is whether bits change, not how well anything is learnt
FEW = ("data.phantom.images=60", "train.batch_size=16", "evaluation.trained=false")
#: what a method and a limit case are compared under
PLAIN = ("train.loss='ce'", "train.aggregation='size'")
ROUNDS = (1, 2)


@dataclass(frozen=True)
class Left:
    """What a run left behind.

    Attributes:
        state: every tensor of the server and of the sites
        scores: what was measured, by view, site and count
        said: the entries of the sites' replies, by action
        sheet: the entries that its disclosure sheet names, by action
    """

    state: Mapping[str, Tensor]
    scores: Mapping[str, Tensor]
    said: Mapping[str, set[str]]
    sheet: Mapping[str, set[str]]

    def differences(self, other: Left) -> set[str]:
        """The tensors that both have and that differ in some bit."""
        both = ((self.state, other.state), (self.scores, other.scores))
        return {name for mine, theirs in both for name in mine.keys() & theirs if not mine[name].equal(theirs[name])}

    def changes(self, other: Left) -> bool:
        """Whether any bit differs, other entries of the model travel, or there is a further view."""
        travels, travelled = (
            {name for name in left.state if name.startswith("server/model/")} for left in (self, other)
        )
        return bool(self.differences(other)) or travels != travelled or self.scores.keys() > other.scores.keys()


def short(method: str, *names: str) -> tuple[str, ...]:
    """Settings under which a short run reaches all that a method and components do, at little cost."""
    parts = [get_method(method).options, *map(get_component, names)]
    return tuple(setting for part in parts for setting in (*part.in_short, *part.at_little_cost))


def given_to(method: str, *names: str) -> list[str]:
    """The components that these components need on a method, and that neither the method nor they bring."""
    there = [*get_method(method).options().components(), *(get_component(name)() for name in names)]
    given = GRANTED.union(*(component.gives() for component in there))
    needed = set[str]().union(*(get_component(name)().needs() for name in names)) - given
    return [name for name in component_names() if get_component(name)().gives() & needed]


def limit_of(name: str) -> tuple[str, ...]:
    """Settings under which a component changes nothing; none where it has no such limit."""
    return tuple(f"{name}.{key}={json.dumps(value)}" for key, value in get_component(name).limit.items())


def configured(method: str, names: Sequence[str], *settings: str) -> Config:
    """The config of a short run of a method with components."""
    return tiny_config(method, *FEW, f"components={json.dumps(list(names))}", *settings)


@cache
def federation() -> Federation:
    """The images of all compositions."""
    return tiny_federation(tiny_config("fedavg", *FEW))


def played(config: Config) -> Left:
    """Two rounds, and the scores before them and after."""
    method = get_method(config.method)
    data = federation().pooled() if method.pooled else federation()
    setting = Setting.of(config, method, data)
    sites = [site.name for site in data.training_sites()]
    said: dict[str, set[str]] = {}
    scores: dict[str, Tensor] = {}
    with TemporaryDirectory() as folder, LocalEngine(method, setting, data, Path(folder)) as engine:
        server = method.server_class(config)(setting)
        evaluator = Evaluator(engine, server, data)
        for number in (0, *ROUNDS):
            engine.begin(number, 0)
            _converse(server.start(sites) if number == 0 else server.round(number, sites), engine, said)
            server.state.check()
            engine.commit()
            if number in (0, ROUNDS[-1]):
                for score in _last(evaluator.round_scores(number, ("valid",))):
                    key = f"{number}/{score.site}/{score.view}"
                    scores |= {f"{key}/{name}": counts for name, counts in score.counts.items()}
        state = {f"server/{name}": t for name, t in flatten(server.state.snapshot())[0].items()}
        for site in sites:
            state |= {f"{site}/{name}": t for name, t in (engine.states.load(site) or {}).items()}
        sheet = {action: set(entries) for action, entries in engine.client.discloses.items() if entries}
    assert all(t.isfinite().all() for t in state.values() if t.is_floating_point())
    return Left(state, scores, said, sheet)


def _converse(conversation: Conversation, engine: LocalEngine, said: dict[str, set[str]]) -> None:
    """Let the server ask; every site has to answer."""
    replies: Replies | None = None
    while True:
        try:
            ask: Ask = next(conversation) if replies is None else conversation.send(replies)
        except StopIteration:
            return
        replies = _last(engine.ask(ask))
        assert not engine.failed, engine.failed
        for reply in replies:
            if reply.payload:
                said.setdefault(ask.action, set()).update(reply.payload)


def _last(work: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value
