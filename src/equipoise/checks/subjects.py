"""What is checked: each plug-in of a user's file, put into a tiny run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from equipoise.components import get_component
from equipoise.contract.config import Config
from equipoise.contract.method import Method
from equipoise.core.errors import UserError
from equipoise.core.outside import find
from equipoise.core.plugins import GROUPS, is_plugin
from equipoise.data import Federation, load_federation
from equipoise.engine.local_engine import LocalEngine
from equipoise.engine.loop import Observer, Run
from equipoise.engine.runs import decided_by_data, make_config
from equipoise.methods import get_method

#: a federation and a run that take a second
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


class Skipped(Exception):
    """A check that does not apply, and why."""


@dataclass(frozen=True)
class Subject:
    """What is checked: a method under settings, which may name other plug-ins."""

    method: str
    settings: tuple[str, ...] = ()

    def config(self, *more: str) -> Config:
        """The config of a tiny run."""
        return make_config(None, [*TINY, *self.settings, *more], method=self.method)

    def federation(self, *more: str) -> Federation:
        """The data of the tiny runs."""
        config = self.config(*more)
        return load_federation(config.data, config.seed)

    def sheet(self) -> dict[str, dict[str, str]]:
        """What its sites disclose."""
        config = self.config()
        return get_method(config.method).client_class(config).discloses

    @property
    def has_data(self) -> bool:
        """Whether it brings images, in place of the phantom."""
        return any(setting.startswith("data.name=") for setting in self.settings)

    def run(
        self,
        folder: Path,
        *more: str,
        method: Method | None = None,
        resume: bool = False,
        observers: tuple[Observer, ...] = (),
        engine: type[LocalEngine] = LocalEngine,
    ) -> Path:
        """Run it in a folder, with another method in its place where one is given."""
        config = self.config(*more)
        federation = load_federation(config.data, config.seed)
        config = decided_by_data(config, federation)
        known = method or get_method(config.method)
        Run(config, known, federation, folder, observers, engine=engine).execute(resume)
        return folder


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
