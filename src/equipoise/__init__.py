"""Equipoise: federated learning for medical images when classes are imbalanced and hospitals differ."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from equipoise.core.version import __version__

if TYPE_CHECKING:
    from equipoise.api import Comparison, Result, compare, load_federation, load_result, train
    from equipoise.components.averaging import FedAvgClient, FedAvgServer
    from equipoise.contract.component import ServerSide, SiteSide
    from equipoise.contract.method import Batch, Client, Component, Method, Options, Server, Setting
    from equipoise.contract.protocol import Ask, Evaluate, PerSite, Scan, Train
    from equipoise.core.errors import UserError
    from equipoise.data.federation import Federation
    from equipoise.data.raw import Location
    from equipoise.data.sources import Listing, Record
    from equipoise.metrics import Metric, Tally

#: where each public name is defined; Python imports a module at its name's first use
_HOMES = {
    "api": ("Comparison", "Result", "compare", "load_federation", "load_result", "train"),
    "components.averaging": ("FedAvgClient", "FedAvgServer"),
    "contract.component": ("ServerSide", "SiteSide"),
    "contract.method": ("Batch", "Client", "Component", "Method", "Options", "Server", "Setting"),
    "contract.protocol": ("Ask", "Evaluate", "PerSite", "Scan", "Train"),
    "core.errors": ("UserError",),
    "data.federation": ("Federation",),
    "data.raw": ("Location",),
    "data.sources": ("Listing", "Record"),
    "metrics": ("Metric", "Tally"),
}

__all__ = [
    "__version__",
    "Ask",
    "Batch",
    "Client",
    "Comparison",
    "Component",
    "Evaluate",
    "FedAvgClient",
    "FedAvgServer",
    "Federation",
    "Listing",
    "Location",
    "Method",
    "Metric",
    "Options",
    "PerSite",
    "Record",
    "Result",
    "Scan",
    "Server",
    "ServerSide",
    "Setting",
    "SiteSide",
    "Tally",
    "Train",
    "UserError",
    "compare",
    "load_federation",
    "load_result",
    "train",
]


if not TYPE_CHECKING:  # so that type checkers refuse names that are not there

    def __getattr__(name: str) -> Any:
        for module, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"equipoise.{module}"), name)
        raise AttributeError(f"module 'equipoise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
