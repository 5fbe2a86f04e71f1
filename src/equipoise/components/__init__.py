"""FedAvg, and ideas that can be put on any method, one file each. Files that begin with _ hold shared code."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from equipoise.contract.component import Component, Sheet, variations
from equipoise.contract.composition import EPOCH, TRAIN, Names
from equipoise.contract.config import Config
from equipoise.core.errors import UserError
from equipoise.core.suggestions import unknown

#: modules of this package that hold no component
BASES = ("averaging",)


def component_names() -> list[str]:
    """All components, in alphabetical order."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in modules if not name.startswith("_") and name not in BASES)


@cache
def get_component(name: str) -> type[Component]:
    """A component by name."""
    known = component_names()
    if name not in known:
        raise unknown("component", name, known)
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    component: type[Component] = module.COMPONENT
    return component


@cache
def loss_names() -> dict[str, str]:
    """{value of train.loss: the component that computes it}; plain cross entropy needs none."""
    found = {}
    for name in component_names():
        loss = getattr(get_component(name), "loss_name", "")
        if loss:
            found[loss] = name
    return found


def component_tables(keys: Iterable[str]) -> dict[str, type[Component]]:
    """The option tables among the keys of a config that belong to components; NPR's is a part of every config."""
    return {key: get_component(key) for key in set(keys) & set(component_names()) - set(Config.model_fields)}


def component_of(name: str, config: Config) -> Component:
    """A component with the options that a config gives it."""
    kind = get_component(name)
    given: Any = config.npr.model_dump() if name == "npr" else config.methods.get(name, {})
    return kind.model_validate(given)


def chosen(config: Config, own: Sequence[Component], holds: Iterable[str]) -> list[Component]:
    """The components of a run: those that its method consists of, those that the config names, NPR and the loss."""
    found = {component.name: component for component in own}
    for name in config.components:
        found.setdefault(name, component_of(name, config))
    if config.npr.weight:
        found.setdefault("npr", component_of("npr", config))
    taken = set(holds).union(*(component.holds() for component in found.values()))
    for name in config.components:
        if "loss" in found[name].holds() and config.train.loss not in ("ce", getattr(found[name], "loss_name", "")):
            raise UserError(
                f"train.loss = '{config.train.loss}', but the component {name} is the loss; leave one of them out"
            )
    if config.train.loss != "ce" and not taken & {"loss", "train.loss"}:
        name = loss_of(config.train.loss)
        found.setdefault(name, component_of(name, config))
    return sorted(found.values(), key=lambda component: (component.rank, component.name))


def loss_of(name: str) -> str:
    """The component that computes a value of train.loss."""
    known = loss_names()
    if name not in known:
        raise UserError(f"train.loss = '{name}' is not known; choose one of ce, {', '.join(known)}")
    return known[name]


def defaults_of(names: Iterable[str]) -> Mapping[str, Any]:
    """Config values that choosing these components implies, unless the user sets them."""
    found: dict[str, Any] = {}
    for name in names:
        found |= get_component(name).defaults
    return found


def component_sheets() -> list[Sheet]:
    """What each component lets leave a site on any method, under any single switch of its options."""
    found: list[Sheet] = []
    for name in component_names():
        for component in variations(get_component(name)):
            names = Names((), {})
            sheet: Sheet = {}
            for action, entries in component.discloses().items():
                joins = action in (TRAIN, EPOCH)
                called = {names(component, entry): text for entry, text in entries.items()} if joins else dict(entries)
                sheet[action if joins else names(component, action)] = called
            found.append(sheet)
    return found


def describe(name: str) -> str:
    """What a component is, in the first paragraph of its file."""
    get_component(name)
    return _first_paragraph(name)


def _first_paragraph(name: str) -> str:
    path = Path(__file__).with_name(f"{name.replace('-', '_')}.py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ")
