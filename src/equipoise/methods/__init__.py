"""The methods, one file each; the file's name (with - for _) is the method's name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise import components
from equipoise.contract.component import Component
from equipoise.contract.composition import sheet_of
from equipoise.contract.config import Config
from equipoise.contract.fitting import check_fit, check_needs_of_task
from equipoise.contract.method import Method, Options
from equipoise.contract.single import check_sums
from equipoise.core import plugins
from equipoise.core.definitions import module_names, names_in_papers
from equipoise.core.errors import UserError
from equipoise.core.outside import short_name
from equipoise.core.plugins import entry_names, is_plugin
from equipoise.core.suggestions import unknown
from equipoise.core.table import written
from equipoise.tasks import Task

#: measured costs of each method beside FedAvg, written by benchmarks/method_costs.py
COSTS = Path(__file__).with_name("costs.json")


def method_names() -> list[str]:
    """All methods, in alphabetical order."""
    return sorted(name.replace("_", "-") for name in module_names(*__path__) if not name.startswith("_"))


def get_method(name: str) -> Method:
    """A method by name, described by its file, and ready for the components that a config puts on it.

    The name of a composition, such as `fedbn+margins`, gives the method that it begins with.
    """
    name = name.split("+")[0]
    if name not in method_names():
        if is_plugin("method", name):
            return dataclasses.replace(_from_outside(name), compose=composition)
        raise unknown("method", name, [*method_names(), *entry_names("method")], names_in_papers("methods"))
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    if not hasattr(module, "METHOD"):
        raise UserError(f"{module.__file__} defines no METHOD; files whose names begin with _ need none")
    first_paragraph = (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " ")
    return dataclasses.replace(module.METHOD, summary=first_paragraph, compose=composition)


def _from_outside(name: str) -> Method:
    """The method of a file, a module or a Python program, described by its file or its client."""
    found = plugins.find("method", name)
    if not isinstance(found, Method):
        raise UserError(f"{name} is {type(found).__name__} and no equipoise.Method; name one")
    told = inspect.getdoc(sys.modules.get(found.client.__module__)) or inspect.getdoc(found.client) or ""
    return dataclasses.replace(found, summary=found.summary or told.split("\n\n")[0].replace("\n", " "))


def named(method: Method) -> str:
    """The name of a method that Python gives as an object, as configs hold it."""
    title = method.client.__name__.removesuffix("Client")
    return plugins.named(method, method.server, method.client, method.options, home=method.client, title=title)


def measured_costs() -> dict[str, dict[str, float]]:
    """{method: {"compute": .., "traffic": .., "evaluation": ..}} beside FedAvg on the phantom, as last measured."""
    return json.loads(COSTS.read_text()) if COSTS.exists() else {}


def composition(method: Method, config: Config) -> Sequence[Component]:
    """The components of a run: the method's, those that the config names, NPR and the supervised loss."""
    options = method.options_of(config)
    chosen = components.chosen(config, options.components(), options.holds())
    found = [component.fitted(options.lacks(), chosen) for component in chosen]
    added = [components.get_component(name).name for name in config.components]
    check_fit(config.method, options, found, added, config.net.lacks())
    if config.privacy.secure_sums:
        own = [component.name for component in options.components()]
        check_sums(config, sheet_of(method.client, found, own, method.names), options, found, method.pooled)
    return found


def check_task(config: Config, task: type[Task]) -> None:
    """Refuse a method, or components on it, that cannot work on the data's task."""
    method = get_method(config.method)
    check_needs_of_task(config.method, method.options_of(config), method.components_of(config), task)


def option_tables(keys: Iterable[str]) -> dict[str, type[Options]]:
    """The option tables among the keys of a config: those named like a method or a component."""
    known = {*method_names(), *entry_names("method")}
    found: dict[str, type[Options]] = {key: get_method(key).options for key in set(keys) & known}
    name = str(keys.get("method", "")).split("+")[0] if isinstance(keys, Mapping) else ""
    if name not in known and is_plugin("method", name):
        found[short_name(name)] = get_method(name).options
    return found | components.component_tables(keys)


def all_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a method, with defaults where none are given; those that are None are left out."""
    return written(get_method(name).options.model_validate(given))
