"""What a hospital lets out: the entries of each action's reply that its policy allows, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches

from equipoise.engine.contract import Client
from equipoise.engine.site import EVALUATE
from equipoise.errors import UserError
from equipoise.methods import get_method, method_names

DESCRIBE = "describe"
COUNTS = "counts"
PROGRESS = "progress"

#: what every run needs besides the method's own replies
ALWAYS = {
    DESCRIBE: {COUNTS: "number of local images of each class in the training, validation and test part"},
    EVALUATE: {COUNTS: "confusion matrix, calibration bins, loss and per-class AUC of local images"},
}

#: what a site tells of its work with every answer, if its policy allows; runs do without
OPTIONAL = {
    PROGRESS: {
        "loss": "mean training loss",
        "examples": "number of images seen in training, repeats included",
        "steps": "number of training steps",
        "seconds": "duration of the work",
    }
}

Policy = Mapping[str, Sequence[str]]


def disclosures(client: type[Client]) -> dict[str, dict[str, str]]:
    """Everything that leaves a site when this method runs: its disclosure sheet, and what every run needs."""
    return {action: dict(entries) for action, entries in client.discloses.items() if entries} | ALWAYS


def policy_for(client: type[Client]) -> dict[str, list[str]]:
    """The policy that allows what a method needs, and to tell how the work goes; nothing more."""
    return {action: sorted(entries) for action, entries in (disclosures(client) | OPTIONAL).items()}


def facts_that_may_leave(policy: Policy, facts: Mapping[str, float]) -> dict[str, float]:
    """What a site may tell of its work."""
    return {name: value for name, value in facts.items() if name in policy.get(PROGRESS, ())}


def refused(policy: Policy, client: type[Client]) -> list[str]:
    """The disclosures, as `action.entry`, that a method needs and the policy does not allow."""
    return [
        f"{action}.{entry}"
        for action, entries in disclosures(client).items()
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
    for action, needed in ALWAYS.items():
        for entry in needed.keys() - set(policy.get(action, ())):
            raise UserError(f"policy: every run needs '{entry}' in '{action}'; add it to the line {action} = [...]")


def _vocabulary() -> dict[str, set[str]]:
    """{action: entries} over all methods and their variants, and what every run needs or a site may tell."""
    for name in method_names():
        get_method(name)  # imports it
    known: dict[str, set[str]] = {}
    for sheet in (ALWAYS, OPTIONAL, *(client.discloses for client in _clients(Client))):
        for action, entries in sheet.items():
            known.setdefault(action, set()).update(entries)
    return known


def _clients(client: type[Client]) -> Iterator[type[Client]]:
    """A class of clients and all that are made from it: a method may have several, for several configs."""
    yield client
    for special in client.__subclasses__():
        yield from _clients(special)


def _meant(word: str, known: Collection[str]) -> str:
    """Advice about a word that is not known."""
    close = get_close_matches(word, known, 1)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(sorted(known))}"
