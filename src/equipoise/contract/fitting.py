"""Whether components fit a method and each other: one holder for each seat, and every need met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from types import MappingProxyType

from equipoise.contract.component import Component, Options
from equipoise.contract.words import GRANTED, SEATS, WORDS
from equipoise.core.errors import UserError
from equipoise.tasks import Task


def check_fit(
    method: str,
    options: Options,
    components: Sequence[Component],
    added: Iterable[str] = (),
    net_lacks: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuse components that cannot be put together, in one sentence that names both sides and the remedy.

    Args:
        components: all of a run, those of the method included
        added: the names of those that the user put on the method
        net_lacks: words that the net does not grant, and why
    """
    own = {component.name for component in options.components()}
    for name in sorted(own & set(added)):
        raise UserError(
            f"the component {name} is part of the method {method} already; leave it out, and set options of {method}"
        )
    called = {
        name: f"{name}, which is part of the method {method}," if name in own else f"the component {name}"
        for name in (component.name for component in components)
    }
    _check_seats(method, options, components, called)
    _check_staying(components, called)
    _check_needs(method, options, components, called)
    _check_net(components, called, net_lacks)


def _check_net(components: Sequence[Component], called: Mapping[str, str], net_lacks: Mapping[str, str]) -> None:
    """Refuse a component that needs layers which the net does not have."""
    for component in components:
        for word in sorted(component.needs() & net_lacks.keys()):
            raise UserError(f"{called[component.name]} needs {WORDS[word]}, which {net_lacks[word]}")


def _check_seats(method: str, options: Options, components: Sequence[Component], called: Mapping[str, str]) -> None:
    holders = dict.fromkeys(options.holds(), f"the method {method}")
    for component in components:
        for seat in sorted(component.holds()):
            if seat in holders:
                raise UserError(
                    f"{called[component.name]} and {holders[seat]} both decide {SEATS[seat]}; leave one out"
                )
            holders[seat] = called[component.name]


def _check_staying(components: Sequence[Component], called: Mapping[str, str]) -> None:
    for component, other in permutations(components, 2):
        if component.stays and set(component.stays) <= set(other.stays):
            raise UserError(
                f"{called[component.name]} adds nothing to {called[other.name].rstrip(',')}, "
                f"which keeps {' and '.join(other.stays)} at the sites; leave one out"
            )


def _check_needs(method: str, options: Options, components: Sequence[Component], called: Mapping[str, str]) -> None:
    given = {word for component in components for word in component.gives()}
    for component in components:
        takers = dict.fromkeys(options.lacks(), f"the method {method} does not have")
        for other in components:
            if other is not component:  # what a component takes from all others, it may need itself
                takers |= dict.fromkeys(other.lacks(), f"{called[other.name]} takes away")
        for word in sorted(component.needs()):
            if word in takers:
                why, remedy = takers[word], "leave one of them out"
            elif word in given or word in GRANTED:
                continue
            else:
                why, remedy = "no other component gives", f"add one that does{_givers(word)}"
            raise UserError(f"{called[component.name]} needs {WORDS.get(word, word)}, which {why}; {remedy}")


def check_needs_of_task(method: str, options: Options, components: Sequence[Component], task: type[Task]) -> None:
    """Refuse what needs something that the task does not have, such as one label for each image."""
    own = {component.name for component in options.components()}
    for part, name in [(options, method), *((component, component.name) for component in components)]:
        for word in sorted(part.needs() & task.lacks.keys()):
            called = f"{name}, which is part of the method {method}," if name in own else name
            remedy = "choose another method, such as fedavg" if name in {*own, method} else "leave it out"
            raise UserError(f"{called} needs {WORDS[word]}, which {task.lacks[word]}; {remedy}")


def _givers(word: str) -> str:
    named = {"projections": " (projector)", "norm at sites": " (local-norm)", "second view": " (second-view)"}
    return named.get(word, "")
