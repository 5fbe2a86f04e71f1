"""What a hospital lets out: the entries of each action's reply that its policy allows, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from equipoise.engine.contract import Client
from equipoise.engine.site import EVALUATE
from equipoise.errors import UserError

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
