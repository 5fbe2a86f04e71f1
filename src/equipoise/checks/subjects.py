"""From a user's file to what is checked: each plug-in in it, put into a tiny run."""

from __future__ import annotations

from collections.abc import Iterator

from equipoise.checks.battery import Subject
from equipoise.components import get_component
from equipoise.core.errors import UserError
from equipoise.core.outside import find
from equipoise.core.plugins import GROUPS, is_plugin
from equipoise.methods import get_method


def subjects_of(name: str) -> Iterator[tuple[str, Subject]]:
    """The plug-ins that a file or module holds, each with the run that it is checked in.

    Args:
        name: `file.py` or `package.module`, or a method or component of Equipoise
    """
    held = [kind for kind in GROUPS if _holds(kind, name)]
    if not held:
        names = ", ".join(kind.upper() for kind in GROUPS if kind != "source")
        raise UserError(f"{name} holds no plug-in: it defines none of {names}, nor TITLE and listing of a source")
    for kind in held:
        yield kind, _subject(kind, name)


def _holds(kind: str, name: str) -> bool:
    """Whether a file calls something by the name of a kind."""
    if not is_plugin(kind, name):
        return False
    try:
        found = find(name, kind.upper())
    except UserError as problem:
        if "has no" in str(problem):
            return False
        raise
    return kind != "source" or hasattr(found, "TITLE")


def _subject(kind: str, name: str) -> Subject:
    if kind == "method":
        options = get_method(name).options
        return Subject(name, (*options.in_short, *options.at_little_cost))
    if kind == "component":
        component = get_component(name)
        return Subject("fedavg", (f"components=['{name}']", *component.in_short, *component.at_little_cost))
    key = {"net": "net.name", "source": "data.name", "loss": "train.loss", "metric": "evaluation.metric"}[kind]
    return Subject("fedavg", (f"{key}='{name}'",))
