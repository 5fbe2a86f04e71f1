"""Packages of extras, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from equipoise.core.errors import UserError, install


def imported(module: str, extra: str, purpose: str) -> Any:
    """A module that an extra brings, or a message that says how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise UserError(f"{purpose} needs the package {package}: {install(extra)}") from error
