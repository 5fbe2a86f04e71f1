"""Plug-ins at a hospital: a site runs only code that its file allows, and whose hash is the server's.

A run's config names its plug-ins and their hashes. Each site has a separate copy of each. It refuses a run before it
loads any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from equipoise.contract.config import Config
from equipoise.core.errors import UserError
from equipoise.core.plugins import described, is_plugin

#: kinds whose code runs at a site; a site's images come from its own file, and the server computes the metrics
AT_SITES = ("method", "component", "net", "loss")


def run_at_sites(config: Config) -> list[str]:
    """The names of a run's plug-ins that a site needs."""
    return list(dict.fromkeys(name for kind, name in config.used_plugins() if kind in AT_SITES))


def check_plugins(raw: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse a server's config whose plug-ins this site does not allow, or has in another version.

    Args:
        raw: the tables of the config, of which nothing has been loaded
        allowed: the names in the site's file
    """
    hashes = raw.get("plugins", {})
    for kind, name in _named(raw):
        if name not in allowed:
            raise UserError(
                f"this site does not allow the {kind} {name}, whose code comes from outside Equipoise; review its "
                f'file, and add it to the site\'s file: plugins = ["{name}"]'
            )
        here, there = described(kind, name).digest, str(hashes.get(f"{kind} {name}", "unknown"))
        if here != there:
            raise UserError(
                f"the {kind} {name} at this site is not the server's: its hash is {here[:12]} here and {there[:12]} "
                "there; bring the server's file here, review it, and start the site again"
            )


def _named(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The kinds and names of plug-ins in a raw config."""
    named = [("method", raw.get("method", ""))]
    named += [("component", name) for name in raw.get("components", ())]
    named += [("net", raw.get("net", {}).get("name", "")), ("loss", raw.get("train", {}).get("loss", ""))]
    yield from ((kind, str(name)) for kind, name in named if is_plugin(kind, str(name)))
