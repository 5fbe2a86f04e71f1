"""Objects that Python gives in place of names: methods, components, nets, sources, losses and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from equipoise import components as ideas
from equipoise import methods
from equipoise.contract.component import Component
from equipoise.contract.config import Config
from equipoise.contract.method import Method
from equipoise.core import plugins
from equipoise.core.errors import UserError
from equipoise.core.outside import GIVEN
from equipoise.core.table import written
from equipoise.metrics import Metric
from equipoise.nets import outside_modules as nets

#: settings that take objects besides names, and the kind of each
KINDS = {
    "train.loss": "loss",
    "evaluation.metric": "metric",
    "data.name": "source",
    "method": "method",
    "net.name": "net",
}


def name_of(kind: str, given: Any) -> str:
    """The name of an object of a kind, as configs hold it; names stay unchanged."""
    if isinstance(given, str):
        return given
    if kind == "method":
        if not isinstance(given, Method):
            raise UserError(f"method = {given!r} is no equipoise.Method; give one, or the name of one")
        return methods.named(given)
    if kind == "net":
        return nets.named(given)
    if kind == "component":
        if not (inspect.isclass(given) and issubclass(given, Component)):
            raise UserError(f"components: {given!r} is no equipoise.Component; give one, or the name of one")
        return ideas.named(given)
    if kind == "metric" and isinstance(given, Metric):
        return plugins.named(given, given.of, title=given.name)
    if kind == "source":
        if isinstance(given, ModuleType):
            return given.__name__ if "." in given.__name__ else f"{given.__file__}"
        if not hasattr(given, "listing"):
            raise UserError(f"source = {given!r} is no source of images; name one, such as 'folder:DIR'")
        return plugins.named(given, *(value for value in vars(given).values() if callable(value)), home=given)
    if not callable(given):
        raise UserError(f"{kind} = {given!r} is no function; give one, or the name of one")
    return plugins.named(given)


def with_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, with names in place of objects."""
    return {key: name_of(KINDS[key], value) if key in KINDS else value for key, value in settings.items()}


def component_settings(given: Sequence[str | type[Component] | Component]) -> dict[str, Any]:
    """The settings that a list of components stands for: their names, and the options of instances."""
    if isinstance(given, str):
        raise UserError(f'components = {given!r} is one name; give a list, such as ["margins"]')
    names: list[str] = []
    options: dict[str, Any] = {}
    for one in given:
        kind = type(one) if isinstance(one, Component) else one
        called = getattr(kind, "name", kind)
        builtin = called in ideas.component_names() and (isinstance(kind, str) or ideas.get_component(called) is kind)
        names.append(str(called) if builtin else name_of("component", kind))
        if isinstance(one, Component):
            options |= {f"{called}.{key}": value for key, value in written(one).items()}
    return ({"components": names} if names else {}) | options


def refuse_workers(config: Config) -> None:
    """Worker processes find modules and files, but no objects of this process."""
    here = [name for _, name in config.used_plugins() if name.startswith(GIVEN)]
    if here and config.compute.workers > 1:
        raise UserError(
            f"worker processes cannot see {here[0]}, which only this process knows; define it in a module, or leave "
            "workers out"
        )
