"""Answers to names that do not exist: the name that was probably meant, and all that there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from equipoise.core.errors import UserError

#: how alike two names must be
ALIKE = 0.6


def meant(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str | None:
    """The known name that a mistyped one is closest to, also by another spelling of it.

    >>> meant("fedagv", ["fedavg", "fedprox"])
    'fedavg'
    >>> meant("PRR-Imbalance", ["prr"], {"PRR-Imbalance": "prr"})
    'prr'
    """
    spellings = {_bare(other): target for other, target in (aliases or {}).items()}
    spellings |= {_bare(other): other for other in known}
    close = get_close_matches(_bare(name), spellings, 1, ALIKE)
    return spellings[close[0]] if close else None


def meant_or_all(name: str, known: Iterable[str], several: str, aliases: Mapping[str, str] | None = None) -> str:
    """What an error about a name ends with: the name that was probably meant, or else all names.

    >>> meant_or_all("demmo", ["demo", "prr"], "presets")
    "did you mean 'demo'?"
    >>> meant_or_all("x", ["demo", "prr"], "presets")
    'presets: demo, prr'
    """
    names = list(known)
    close = meant(name, names, aliases)
    return f"did you mean '{close}'?" if close else f"{several}: {', '.join(names) or 'none'}"


def unknown(what: str, name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> UserError:
    """The error for a name that does not exist; `what` is what it should name, such as "method"."""
    several = f"{what}es" if what.endswith("s") else f"{what}s"
    return UserError(f"there is no {what} '{name}'; {meant_or_all(name, known, several, aliases)}")


def _bare(name: str) -> str:
    """A name's letters and digits alone."""
    return "".join(mark for mark in name.casefold() if mark.isalnum())
