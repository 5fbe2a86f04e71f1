"""Nets: each gives features and a head that makes logits of them, and names which tensors are body, head and norm."""

from typing import TYPE_CHECKING

from equipoise.core.lazy import on_demand

if TYPE_CHECKING:
    from equipoise.nets.building import build_net
    from equipoise.nets.net import Net, all_but, class_rows, entries_of, groups
    from equipoise.nets.net_config import NetConfig

__all__ = ["Net", "NetConfig", "all_but", "build_net", "class_rows", "entries_of", "groups"]

__getattr__ = on_demand(__name__, __all__, "net_config", "net", "building")
