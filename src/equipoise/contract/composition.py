"""Components on a method: two classes that stand over the method's own server and client, and drive their generators.

A method's code does not know which components are on it. Surveys run before its round, and entries of components join
its request to train. Components may cut its local training into epochs. Server steps come after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from equipoise.contract.client import Client
from equipoise.contract.component import Component, Sheet
from equipoise.contract.composed import EPOCH, TRAIN, Names
from equipoise.contract.composed_client import ComposedClient, adapts
from equipoise.contract.composed_server import ComposedServer
from equipoise.contract.protocol import Payload
from equipoise.contract.server import Server
from equipoise.contract.summed import like


def composed_client(
    client: type[Client], components: Sequence[Component], own: Iterable[str], names: Mapping[str, str]
) -> type[Client]:
    """A method's client with components on it; `own` names those that the method consists of."""
    if not components:
        return client
    called = Names(own, names)
    views = client.views
    for component in components:
        views = component.views(views)
    body: dict[str, Any] = {
        "__doc__": client.__doc__,
        "composition": tuple(components),
        "names": called,
        "method_client": client,
        "discloses": _sheet(client, components, called),
        "views": views,
    }
    for component in components:
        for action in component.discloses().keys() - {TRAIN, EPOCH}:
            body[called(component, action)] = _action(component.name, action)
    return type(f"{client.__name__}With{len(components)}", (ComposedClient, client), body)


def composed_server(
    server: type[Server],
    client: type[Client],
    components: Sequence[Component],
    own: Iterable[str],
    names: Mapping[str, str],
) -> type[Server]:
    """A method's server with components on it."""
    if not components:
        return server
    body = {
        "__doc__": server.__doc__,
        "composition": tuple(components),
        "names": Names(own, names),
        "adapting": adapts(client),
    }
    return type(f"{server.__name__}With{len(components)}", (ComposedServer, server), body)


def sheet_of(
    client: type[Client], components: Sequence[Component], own: Iterable[str], names: Mapping[str, str]
) -> Sheet:
    """What leaves a site through a client with components on it."""
    return _sheet(client, components, Names(own, names))


def _sheet(client: type[Client], components: Sequence[Component], names: Names) -> Sheet:
    sheet = {action: dict(entries) for action, entries in client.discloses.items()}
    staying = [group for component in components for group in component.stays]
    if staying and "model" in sheet.get(TRAIN, {}):
        kept = {"norm": "norm layers", "statistics": "running statistics", "head": "the classifier"}
        without = " and ".join(kept.get(group, group) for group in dict.fromkeys(staying))
        text = f"the net's weights after local training, without {without}"
        sheet[TRAIN]["model"] = like(text, sheet[TRAIN]["model"])
    for component in components:
        for action, entries in component.discloses().items():
            if action in (TRAIN, EPOCH):
                called = {names(component, entry): text for entry, text in entries.items()}
                sheet[action] = sheet.get(action, {}) | called
            else:
                sheet[names(component, action)] = dict(entries)
    return sheet


def _action(component: str, action: str) -> Any:
    """The client's method that performs a component's action."""

    def perform(client: ComposedClient, message: Payload) -> Any:
        return getattr(client.sides[component], action)(message)

    return perform
