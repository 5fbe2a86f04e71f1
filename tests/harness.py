"""Tiny runs for tests: a phantom federation of a few images, any method, and what a run left behind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from equipoise.contract.config import Config
from equipoise.contract.method import Client, Method
from equipoise.contract.protocol import SiteFailure, flatten
from equipoise.data import Federation, load_federation
from equipoise.engine.loop import Run
from equipoise.engine.payload_files import read_payload
from equipoise.engine.runs import make_config
from equipoise.methods import get_method

TINY = (
    "train.rounds=2",
    "train.epochs=1",
    "train.batch_size=8",
    "data.phantom.images=160",
    "data.phantom.sites=3",
    "data.phantom.classes=4",
    "data.phantom.size=16",
    "augment.name='flips'",
)


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
    known = get_method(method)

    class Changed(Method):
        def client_class(self, config: Config) -> type[Client]:
            return change(super().client_class(config))

    return Changed(**{field.name: getattr(known, field.name) for field in dataclasses.fields(known)})


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


def events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The events of a run, all or of one kind."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if kind is None or line["event"] == kind]


def last_checkpoint(folder: Path) -> Path:
    """The newest checkpoint's folder."""
    return sorted((folder / "checkpoints").glob("round-?????"))[-1]


def server_state(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the server's state after the last round, by flat name."""
    return flatten(read_payload(last_checkpoint(folder) / "server.safetensors"))[0]


def site_states(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that sites keep after the last round, by site and flat name."""
    manifest = json.loads((last_checkpoint(folder) / "manifest.json").read_text())
    states = {}
    for site, version in manifest["sites"].items():
        (path,) = (p for p in (folder / "sites").glob(f"*/{version}.safetensors") if p.parent.name == _quoted(site))
        states.update({f"{site}/{name}": t for name, t in flatten(read_payload(path))[0].items()})
    return states


def _quoted(site: str) -> str:
    from equipoise.engine.payload_files import safe_name

    return safe_name(site)


def all_state(folder: Path) -> dict[str, torch.Tensor]:
    """Server and site tensors after the last round."""
    return {f"server/{k}": v for k, v in server_state(folder).items()} | site_states(folder)


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Two states agree bit for bit."""
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"differ: {different[:5]}"
