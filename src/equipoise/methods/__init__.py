"""The methods, one file each; the file's name (with - for _) is the method's name."""

from __future__ import annotations

import importlib
import pkgutil

from equipoise.config import Table
from equipoise.engine.contract import Method
from equipoise.errors import UserError

_NOT_METHODS = {"common"}


def method_names() -> list[str]:
    """All methods, in alphabetical order."""
    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(__path__)
        if module.name not in _NOT_METHODS and not module.name.startswith("_")
    )


def get_method(name: str) -> Method:
    """A method by name."""
    if name not in method_names():
        raise UserError(f"there is no method '{name}'; methods: {', '.join(method_names())}")
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return module.METHOD


def option_tables() -> dict[str, type[Table]]:
    """The config tables of all methods that have options."""
    methods = {name: get_method(name) for name in method_names()}
    return {method.table or name: method.options for name, method in methods.items() if method.options.model_fields}
