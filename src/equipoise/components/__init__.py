"""FedAvg, and ideas that can be put on any method, one file each. Files that begin with _ hold shared code."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from equipoise.components._outside_loss import loss_component
from equipoise.contract.component import Component, Sheet, variations
from equipoise.contract.composed import EPOCH, TRAIN, Names
from equipoise.contract.config import Config
from equipoise.core import plugins
from equipoise.core.definitions import module_names, modules_in, names_in_papers
from equipoise.core.errors import UserError
from equipoise.core.plugins import entry_names, find, is_plugin
from equipoise.core.suggestions import unknown

#: modules of this package that hold no component
BASES = ("averaging",)


def component_names() -> list[str]:
    """All components, in alphabetical order."""
    return sorted(
        name.replace("_", "-") for name in module_names(*__path__) if not name.startswith("_") and name not in BASES
    )


def get_component(name: str) -> type[Component]:
    """A component by name, of this package or from outside."""
    known = component_names()
    if name in known:
        component: type[Component] = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").COMPONENT
        return component
    if is_plugin("component", name):
        return _from_outside(name, known)
    raise unknown("component", name, [*known, *entry_names("component")], names_in_papers("components"))


def _from_outside(name: str, known: Iterable[str]) -> type[Component]:
    """The component of a file, a module or a Python program."""
    found = find("component", name)
    if not (inspect.isclass(found) and issubclass(found, Component)):
        raise UserError(f"{name} is {type(found).__name__} and no subclass of equipoise.Component; name one")
    called = getattr(found, "name", "")
    if not called or called in known or called in Config.model_fields or called in modules_in("methods"):
        raise UserError(
            f"the component {name} is called {called!r}, which is empty or taken; give it another `name`, which heads "
            "its table of options"
        )
    return found


def named(component: type[Component]) -> str:
    """The name of a component that Python gives as a class, as configs hold it."""
    return plugins.named(component, component, component.Site, component.Server)


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
    found = {key: get_component(key) for key in set(keys) & set(component_names()) - set(Config.model_fields)}
    named = keys.get("components", ()) if isinstance(keys, Mapping) else ()
    added = [get_component(name) for name in named if name not in component_names()]
    return found | {kind.name: kind for kind in added}


def component_of(name: str, config: Config) -> Component:
    """A component with the options that a config gives it."""
    kind = get_component(name)
    given: Any = config.npr.model_dump() if name == "npr" else config.methods.get(kind.name, {})
    return kind.model_validate(given)


def chosen(config: Config, own: Sequence[Component], holds: Iterable[str]) -> list[Component]:
    """The components of a run: those that its method consists of, those that the config names, NPR and the loss."""
    found = {component.name: component for component in own}
    added = [component_of(name, config) for name in config.components]
    for component in added:
        found.setdefault(component.name, component)
    if config.npr.weight:
        found.setdefault("npr", component_of("npr", config))
    taken = set(holds).union(*(component.holds() for component in found.values()))
    for name in (component.name for component in added):
        if "loss" in found[name].holds() and config.train.loss not in ("ce", getattr(found[name], "loss_name", "")):
            raise UserError(
                f"train.loss = '{config.train.loss}', but the component {name} is the loss; leave one of them out"
            )
    if config.train.loss != "ce" and not taken & {"loss", "train.loss"}:
        component = loss_of(config.train.loss, config)
        found.setdefault(component.name, component)
    return sorted(found.values(), key=lambda component: (component.rank, component.name))


def loss_of(name: str, config: Config) -> Component:
    """The component that computes a value of train.loss."""
    known = loss_names()
    if name in known:
        return component_of(known[name], config)
    if is_plugin("loss", name):
        return loss_component(name)
    raise UserError(f"train.loss: {unknown('loss', name, ['ce', *known, *entry_names('loss')])}")


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
    kind = get_component(name)
    if name not in component_names():
        told = inspect.getdoc(sys.modules.get(kind.__module__)) or inspect.getdoc(kind) or ""
        return told.split("\n\n")[0].replace("\n", " ")
    return _first_paragraph(name)


def _first_paragraph(name: str) -> str:
    path = Path(__file__).with_name(f"{name.replace('-', '_')}.py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ")
