"""Names that a package imports at their first use. The command line imports packages whose contents need torch, and
version and help pages must not wait for torch."""

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
