"""A method is a `Server`, a `Client`, and options that say which components it consists of.

The class boundary is the hospital's wall: server and client share nothing but messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from equipoise.contract.client import Batch, Client, PerBatch
from equipoise.contract.component import Component, Options, Sheet, variations
from equipoise.contract.composition import composed_client, composed_server, sheet_of
from equipoise.contract.config import Config
from equipoise.contract.server import Server, State
from equipoise.contract.setting import Setting
from equipoise.contract.workplace import Phase
from equipoise.core.outside import short_name

__all__ = ["Batch", "Client", "Component", "Method", "Options", "PerBatch", "Phase", "Server", "Setting", "State"]


def its_own(method: Method, config: Config) -> Sequence[Component]:
    """The components that a method consists of, and no others."""
    options: Options = method.options_of(config)
    return options.components()


@dataclass(frozen=True)
class Method:
    """A method as the registry knows it: a file in `equipoise.methods` holds one as `METHOD`.

    Args:
        changes: what it changes, in a few words: loss, aggregation, personalisation, server step
        options: the model of its config table, which is named like the method; it names the method's components
        defaults: config values that choosing this method implies, unless the user sets them
        pooled: train on all images at one place
        summary: what the method does, in a sentence or two; the registry takes it from the method's file
        compose: the components of a run, those of the config included; the registry knows how to find them
        names: what entries of its components are called, where that is not their own name

    >>> import equipoise as eq
    >>> method = eq.Method(eq.FedAvgServer, eq.FedAvgClient, "none", 2026, "nothing")
    >>> sorted(method.client.discloses["train"])
    ['examples', 'model']
    """

    server: type[Server]
    client: type[Client]
    paper: str
    year: int
    changes: str
    options: type[Options] = Options
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pooled: bool = False
    summary: str = ""
    compose: Callable[[Method, Config], Sequence[Component]] = its_own
    names: Mapping[str, str] = field(default_factory=dict)

    def options_of(self, config: Config) -> Any:
        """The options that a config gives to its method, defaults included."""
        return self.options.model_validate(config.methods.get(short_name(config.method), {}))

    def components_of(self, config: Config) -> Sequence[Component]:
        """The components of a run of this config, in the order in which they act."""
        return self.compose(self, config)

    def client_class(self, config: Config) -> type[Client]:
        """The client that a run of this config uses."""
        own = [component.name for component in self.options_of(config).components()]
        return composed_client(self.client, self.components_of(config), own, self.names)

    def server_class(self, config: Config) -> type[Server]:
        """The server that a run of this config uses."""
        own = [component.name for component in self.options_of(config).components()]
        return composed_server(self.server, self.client, self.components_of(config), own, self.names)

    def widest_sheet(self) -> Sheet:
        """What may leave a site under any single switch of the method's options."""
        sheet: Sheet = {}
        for options in variations(self.options):
            own = options.components()
            names = [component.name for component in own]
            for action, entries in sheet_of(self.client, own, names, self.names).items():
                sheet[action] = sheet.get(action, {}) | entries
        return sheet
