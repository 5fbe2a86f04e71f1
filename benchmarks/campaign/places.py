"""The three places where a campaign runs a method, and what a run leaves there."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "hospitals")]

from equipoise.engine.loop import Run  # noqa: E402
from equipoise.hospitals.office import Records  # noqa: E402
from equipoise.methods import get_method  # noqa: E402
from harness import all_state, events, server_state, tiny_config, tiny_federation  # noqa: E402
from postbox import Hospitals, Postbox  # noqa: E402

PLACES = ("process", "workers", "flower")
FORK = multiprocessing.get_context("fork")
SETTINGS = ("data.phantom.images=96", "checkpoint.keep=1")


class World:
    """One run of one method at one place, in one folder; `go` begins it or goes on with it."""

    def __init__(self, place: str, method: str, folder: Path, post: type[Postbox] = Postbox, *more: str):
        self.place, self.method, self.folder = place, method, folder
        workers = ("compute.workers=2",) if place == "workers" else ()
        self.settings = (*SETTINGS, *workers, *more)
        self.hospitals = Hospitals(folder, method, *self.settings, post=post) if place == "flower" else None

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def go(self, resume: bool = False) -> None:
        """Run to the end."""
        if self.hospitals is not None:
            self.hospitals.run(resume=resume)
            return
        config = tiny_config(self.method, *self.settings)
        with patch.object(multiprocessing, "get_context", lambda method: FORK):  # saves workers their imports
            Run(config, get_method(self.method), tiny_federation(config), self.run).execute(resume)

    def left(self) -> dict[str, Any]:
        """Every tensor of server and sites after the last round, and the final scores."""
        if self.hospitals is None:
            return {**all_state(self.run), "scores": _scores(self.run)}
        return {**server_state(self.run), **self._kept_at_hospitals(), "scores": _scores(self.run)}

    def _kept_at_hospitals(self) -> dict[str, Tensor]:
        assert self.hospitals is not None
        newest = sorted((self.run / "checkpoints").glob("round-?????"))[-1]
        found = {}
        for site, version in json.loads((newest / "manifest.json").read_text())["sites"].items():
            kept = Records(self.hospitals.records(site) / "test").state(version)  # as a site reads it
            found |= {f"{site}/{name}": tensor for name, tensor in kept.items()}
        return found

    def told(self) -> list[dict[str, Any]]:
        """The events of all rounds."""
        return events(self.run, "round")


def _scores(run: Path) -> str:
    finals = [{key: value for key, value in event.items() if key != "seconds"} for event in events(run, "final")]
    return json.dumps(finals, sort_keys=True)


def differing(first: dict[str, Any], second: dict[str, Any]) -> int:
    """How many tensors or scores are not equal to the bit."""
    names = first.keys() | second.keys()
    return sum(not _equal(first.get(name), second.get(name)) for name in names)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other
