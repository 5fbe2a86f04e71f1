"""Tiny runs for tests: a phantom federation of a few images, any method, and what a run left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from equipoise.checks import trouble
from equipoise.checks.subjects import TINY
from equipoise.checks.traces import (
    all_state,
    assert_same_bits,
    events,
    last_checkpoint,
    server_state,
    site_states,
)
from equipoise.contract.config import Config
from equipoise.contract.method import Client, Method
from equipoise.contract.protocol import SiteFailure
from equipoise.data import Federation, load_federation
from equipoise.engine.loop import Run
from equipoise.engine.runs import make_config
from equipoise.methods import get_method

__all__ = [
    "TINY",
    "all_state",
    "assert_same_bits",
    "events",
    "last_checkpoint",
    "run_tiny",
    "server_state",
    "site_sizes",
    "site_states",
    "tiny_config",
    "tiny_federation",
    "with_client",
    "with_lost_site",
]


def tiny_config(method: str = "fedavg", *settings: str) -> Config:
    """A config that runs in a second: 3 sites, 4 classes (some missing at sites), 16 px, two rounds."""
    return make_config(None, [*TINY, *settings], method=method)


def tiny_federation(config: Config) -> Federation:
    """The federation of a config."""
    return load_federation(config.data, config.seed)


def run_tiny(
    folder: Path, method: str | Method = "fedavg", *settings: str, known_as: str = "fedavg", resume: bool = False
) -> Path:
    """Run a method on the tiny phantom, a made-up one under the name and options of a known one; gives the folder."""
    config = tiny_config(method if isinstance(method, str) else known_as, *settings)
    chosen = get_method(method) if isinstance(method, str) else method
    Run(config, chosen, tiny_federation(config), folder).execute(resume)
    return folder


def site_sizes(*settings: str) -> dict[str, int]:
    """The number of training images of each site of the tiny phantom."""
    return {site.name: len(site.splits["train"]) for site in tiny_federation(tiny_config("fedavg", *settings)).sites}


def with_client(method: str, change: Callable[[type[Client]], type[Client]]) -> Method:
    """A method whose client, components included, is changed by a function."""
    return trouble.with_client(get_method(method), change)


def with_lost_site(method: str, lost: str = "site 2", number: int = 1) -> Method:
    """A method one of whose sites is lost in one round, after it has trained."""

    def losing(client: type[Client]) -> type[Client]:
        class Lost(client):  # type: ignore[misc, valid-type]
            def train(self, message: Any) -> Any:
                reply = yield from super().train(message)
                if self.workplace.site == lost and self.workplace.round == number:
                    raise SiteFailure("lost")
                return reply

        return Lost

    return with_client(method, losing)
