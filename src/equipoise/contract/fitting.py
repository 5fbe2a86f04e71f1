"""Whether components fit a method and each other: one holder for each seat, and every need met."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.contract.component import GRANTED, SEATS, WORDS, Component, Options
from equipoise.core.errors import UserError


def check_fit(method: str, options: Options, components: Sequence[Component]) -> None:
    """Refuse components that cannot be put together, in one sentence that names both sides and the remedy."""
    _check_seats(method, options, components)
    _check_needs(method, options, components)


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


def _check_needs(method: str, options: Options, components: Sequence[Component]) -> None:
    takers = dict.fromkeys(options.lacks(), f"the method {method} does not have")
    for component in components:
        takers |= dict.fromkeys(component.lacks(), f"the component {component.name} takes away")
    given = {word for component in components for word in component.gives()}
    for component in components:
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
