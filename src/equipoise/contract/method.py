"""What a method is made of: a `Server`, a `Client`, its options and its disclosure sheet.

The class boundary is the hospital's wall: server and client share nothing but messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from equipoise.contract.client import Batch, Client, PerBatch, Phase
from equipoise.contract.config import Config, Table
from equipoise.contract.server import Server, State
from equipoise.contract.setting import Setting

__all__ = ["Batch", "Client", "Method", "NoOptions", "PerBatch", "Phase", "Server", "Setting", "State"]


class NoOptions(Table):
    """A method without options of its own."""


def as_it_is(client: type[Client], config: Config) -> type[Client]:
    """The client without additions."""
    return client


@dataclass(frozen=True)
class Method:
    """A method as the registry knows it: a file in `equipoise.methods` holds one as `METHOD`.

    Args:
        changes: what it changes, in a few words: loss, aggregation, personalisation, server step
        options: the model of its config table, which is named like the method
        defaults: config values that choosing this method implies, unless the user sets them
        pooled: train on all images at one place
        variants: by the name of an option, the client that takes the place of `client` where that option is on
        summary: what the method does, in a sentence or two; the registry takes it from the method's file
        extend: adds to the client what the config asks for on top of any method (NPR), and no disclosure
    """

    server: type[Server]
    client: type[Client]
    paper: str
    year: int
    changes: str
    options: type[Table] = NoOptions
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pooled: bool = False
    variants: Mapping[str, type[Client]] = field(default_factory=dict)
    summary: str = ""
    extend: Callable[[type[Client], Config], type[Client]] = as_it_is

    @property
    def clients(self) -> tuple[type[Client], ...]:
        """The client and its variants: what a site runs under some options or other."""
        return (self.client, *self.variants.values())

    def options_of(self, config: Config) -> Any:
        """The options that a config gives to its method, defaults included."""
        return self.options.model_validate(config.methods.get(config.method, {}))

    def client_class(self, config: Config) -> type[Client]:
        """The client that a run of this config uses."""
        options = self.options_of(config)
        chosen = next((variant for option, variant in self.variants.items() if getattr(options, option)), self.client)
        return self.extend(chosen, config)
