"""What a hospital lets out: the entries of each action's reply that its policy allows, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

from equipoise.components import component_sheets
from equipoise.contract.method import Client
from equipoise.core.errors import UserError
from equipoise.engine.disclosure import ALWAYS, OPTIONAL, PROGRESS, disclosure_sheet, needed
from equipoise.methods import get_method, method_names

Policy = Mapping[str, Sequence[str]]


def policy_for(client: type[Client]) -> dict[str, list[str]]:
    """The policy that allows what a method needs, and to tell how the work goes; nothing more."""
    return {action: sorted(entries) for action, entries in disclosure_sheet(client).items()}


def facts_that_may_leave(policy: Policy, facts: Mapping[str, float]) -> dict[str, float]:
    """What a site may tell of its work."""
    return {name: value for name, value in facts.items() if name in policy.get(PROGRESS, ())}


def refused(policy: Policy, client: type[Client]) -> list[str]:
    """The disclosures, as `action.entry`, that a method needs and the policy does not allow."""
    return [
        f"{action}.{entry}"
        for action, entries in needed(client.discloses).items()
        for entry in entries
        if entry not in policy.get(action, ())
    ]


def check_policy(policy: Policy, method: str, client: type[Client]) -> None:
    """Refuse a method that asks for more than the policy allows, by name."""
    more = refused(policy, client)
    if more:
        raise UserError(
            f"this site's policy refuses the method '{method}': it would send {', '.join(more)}; "
            f"see `equipoise methods show {method}`"
        )


def check_words(policy: Policy) -> None:
    """Refuse a policy that names what no method sends, or does not allow what every run needs."""
    known = _vocabulary()
    for action, entries in policy.items():
        if action not in known:
            raise UserError(f"policy: no method has an action '{action}'{_meant(action, known)}")
        for entry in entries:
            if entry not in known[action]:
                raise UserError(f"policy: no method sends '{entry}' in '{action}'{_meant(entry, known[action])}")
    for action, always in ALWAYS.items():
        for entry in always.keys() - set(policy.get(action, ())):
            raise UserError(f"policy: every run needs '{entry}' in '{action}'; add it to the line {action} = [...]")


def _vocabulary() -> dict[str, set[str]]:
    """{action: entries} over all methods and components, and what every run needs or a site may tell."""
    sheets = [ALWAYS, OPTIONAL, *(get_method(name).widest_sheet() for name in method_names()), *component_sheets()]
    known: dict[str, set[str]] = {}
    for sheet in sheets:
        for action, entries in sheet.items():
            known.setdefault(action, set()).update(entries)
    return known


def _meant(word: str, known: Collection[str]) -> str:
    """Advice about a word that is not known."""
    close = get_close_matches(word, known, 1)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(sorted(known))}"
