"""Whether components fit a method and each other: one holder for each seat, and every need met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations

from equipoise.contract.component import GRANTED, SEATS, WORDS, Component, Options
from equipoise.core.errors import UserError


def check_fit(method: str, options: Options, components: Sequence[Component], added: Iterable[str] = ()) -> None:
    """Refuse components that cannot be put together, in one sentence that names both sides and the remedy.

    Args:
        components: all of a run, those of the method included
        added: the names of those that the user put on the method
    """
    _check_added(method, options, added)
    _check_seats(method, options, components)
    _check_staying(components)
    _check_needs(method, options, components)


def _check_added(method: str, options: Options, added: Iterable[str]) -> None:
    own = {component.name for component in options.components()}
    for name in sorted(own & set(added)):
        raise UserError(
            f"the component {name} is part of the method {method} already; leave it out, and set options of {method}"
        )


def _check_seats(method: str, options: Options, components: Sequence[Component]) -> None:
    own = {component.name for component in options.components()}
    holders = dict.fromkeys(options.holds(), f"the method {method}")
    for component in components:
        for seat in sorted(component.holds()):
            if seat in holders:
                raise UserError(
                    f"the component {component.name} and {holders[seat]} both decide {SEATS[seat]}; leave one out"
                )
            of_method = f"{component.name}, which is part of the method {method}"
            holders[seat] = of_method if component.name in own else f"the component {component.name}"


def _check_staying(components: Sequence[Component]) -> None:
    for component, other in permutations(components, 2):
        if component.stays and set(component.stays) <= set(other.stays):
            raise UserError(
                f"the component {component.name} adds nothing to {other.name}, which keeps {' and '.join(other.stays)} "
                "at the sites; leave one out"
            )


def _check_needs(method: str, options: Options, components: Sequence[Component]) -> None:
    given = {word for component in components for word in component.gives()}
    for component in components:
        takers = dict.fromkeys(options.lacks(), f"the method {method} does not have")
        for other in components:
            if other is not component:  # what a component takes from all others, it may need itself
                takers |= dict.fromkeys(other.lacks(), f"the component {other.name} takes away")
        for word in sorted(component.needs()):
            if word in takers:
                why, remedy = takers[word], "leave one of them out"
            elif word in given or word in GRANTED:
                continue
            else:
                why, remedy = "no other component gives", f"add one that does{_givers(word)}"
            raise UserError(f"the component {component.name} needs {WORDS.get(word, word)}, which {why}; {remedy}")


def _givers(word: str) -> str:
    named = {"projections": " (projector)", "norm at sites": " (local-norm)", "second view": " (second-view)"}
    return named.get(word, "")
