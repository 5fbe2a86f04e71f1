"""Names and modules that are imported when they are first asked for: the command line passes through packages whose
contents need torch or numpy, and must not wait for them to print a version or a help page."""

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any


def on_demand(package: str, names: Collection[str], *homes: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562): finds one of its `names` in one of its modules, the `homes`."""

    def find(name: str) -> Any:
        for home in homes if name in names else ():
            module = import_module(f"{package}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


class Later:
    """A module that is imported when something in it is first asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        vars(self)[name] = found = getattr(import_module(self._name), name)
        return found
