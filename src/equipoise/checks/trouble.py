"""Methods with trouble in them: sites that are lost or send NaN, runs that stop, hooks that are watched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from equipoise.checks.host_reads import HostReads
from equipoise.contract.config import Config
from equipoise.contract.method import Client, Method
from equipoise.contract.protocol import SiteFailure


def with_client(known: Method, change: Callable[[type[Client]], type[Client]]) -> Method:
    """A method whose client, components included, is changed by a function."""

    class Changed(Method):
        def client_class(self, config: Config) -> type[Client]:
            return change(super().client_class(config))

    return Changed(**{field.name: getattr(known, field.name) for field in dataclasses.fields(known)})


class Stop(Exception):
    """Ends a run as a crash would."""


class StopAt:
    """An observer that ends a run in the middle of a round, or at a later event of it."""

    def __init__(self, number: int, kind: str = "round"):
        self.number, self.kind = number, kind

    def event(self, event: str, **fields: Any) -> None:
        """Stop at the event."""
        if event == self.kind and (event != "round" or fields["round"] == self.number):
            raise Stop


def faulty(client: type[Client], fault: str, site: str = "site 2") -> type[Client]:
    """The client of a method, with one site that sends NaN ("nan") or is lost ("lost") in round 1."""

    class Faulty(client):  # type: ignore[misc, valid-type]
        """The client, in trouble."""

        def train(self, message: Any) -> Any:
            payload = yield from super().train(message)
            if self.workplace.site != site or self.workplace.round != 1:
                return payload
            if fault == "lost":
                raise SiteFailure("lost")
            return {name: _broken(value) for name, value in payload.items()}

    return Faulty


def _broken(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _broken(entry) for name, entry in value.items()}
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.full_like(value, float("nan"))
    return value


def watched(client: type[Client], seen: set[str]) -> type[Client]:
    """The client of a method; operations in hooks of the step that read values on the host are noted in `seen`."""

    def watch(hook: str) -> Callable[..., Any]:
        def watching(self: Any, *arguments: Any) -> Any:
            with HostReads() as reads:
                found = getattr(super(Watched, self), hook)(*arguments)
            seen.update(f"{name} in {hook}" for name in reads.seen)
            return found

        return watching

    class Watched(client):  # type: ignore[misc, valid-type]
        """The client, with its hooks watched."""

        forward, loss = watch("forward"), watch("loss")
        adjust = watch("adjust")

    return Watched
