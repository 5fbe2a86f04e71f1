"""New keys and certificates in place of old ones: `equipoise renew FILE WHAT`, on the machine whose file it is.

A file of public keys may hold two, the new one and the old one, so that a consortium need not change all at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core.errors import UserError, parse_toml
from equipoise.hospitals.authority import Authority, names_of
from equipoise.hospitals.deployment_files import ServerFile, SiteFile
from equipoise.hospitals.security import check_private, new_key_pair, public_line


@dataclass(frozen=True)
class Renewal:
    """What is renewed, and with what.

    Attributes:
        settings: the file of the server or of the site
        authority: the CA's key, which lies elsewhere than the server's files
        days: how long new certificates are valid
    """

    settings: Any
    authority: Path | None
    days: int

    def ca(self) -> list[str]:
        """A new certificate for the CA's own key: servers' certificates stay good, and sites need not hurry."""
        path = self.settings.ca
        self._authority().write_certificate(path)
        return [
            f"new: {path}, valid for {self.days} days",
            "hand it to every site in place of its ca.crt, before the old one ends; until then both are good",
        ]

    def certificate(self) -> list[str]:
        """A new certificate and key for the server, for the names of the old one."""
        path, key = self.settings.certificate, self.settings.key
        names, authority = names_of(path), self._authority()
        authority.issue(names, path, key)
        return [f"new: {path} and {key}, valid for {self.days} days", "it serves from the server's next start on"]

    def coordinator(self) -> list[str]:
        """A new key that signs the server's messages."""
        public = _new_pair(self.settings.coordinator, self.settings.coordinator.with_suffix(".pub"))
        return [
            f"new: {self.settings.coordinator}; {public} holds its public half and the old one",
            f"hand {public.name} to every site in place of the site's; started again, the site obeys both keys",
            "start no run before all sites have it; once they have, the second line can go",
        ]

    def key(self) -> list[str]:
        """A new key that proves who a site is."""
        public = _new_pair(self.settings.key, self.settings.key.with_suffix(".pub"))
        return [
            f"new: {self.settings.key}; {public} holds its public half and the old one",
            f"send {public.name} to the coordinator, in place of the site's file under nodes/; the server's next start "
            "lets both in",
            "then start this site again; once it is connected, the second line can go",
        ]

    def _authority(self) -> Authority:
        if self.authority is None:
            raise UserError("only the CA's key can do this; name its file: --authority ca.key")
        return Authority.read(self.settings.ca, self.authority, self.days)


def renew(file: Path, what: str, authority: Path | None, days: int) -> list[str]:
    """Renew what a server's or site's file names; gives lines that say what is to be done next."""
    kind, possible = _kind(file)
    settings = kind.read(file)
    renewal = Renewal(settings, authority, days)
    ways: dict[str, Callable[[], list[str]]] = {name: getattr(renewal, name) for name in possible}
    if what not in ways:
        raise UserError(f"{file}: '{what}' cannot be renewed here; choose {' or '.join(ways)}")
    lacking = [name for name in ("ca", "certificate", "key", "coordinator") if getattr(settings, name, "") is None]
    if lacking:
        raise UserError(f"{file} names no {', '.join(lacking)}; `equipoise certificates` makes what is needed")
    return ways[what]()


def _kind(file: Path) -> tuple[type[ServerFile] | type[SiteFile], tuple[str, ...]]:
    """Whose file it is, and what of it can be renewed."""
    try:
        content = file.read_bytes()
    except OSError as problem:
        raise UserError(f"cannot read {file}: {problem.strerror}") from None
    if "sites" in parse_toml(content, str(file)):
        return ServerFile, ("ca", "certificate", "coordinator")
    return SiteFile, ("key",)


def _new_pair(private: Path, public: Path) -> Path:
    """A new key in place of an old one, which stays beside it; the public file holds both, the new one first."""
    check_private(private)
    old = public_line(private)
    new_key_pair(private.with_name(f"{private.name}.new"), public)
    public.write_bytes(public.read_bytes() + old)
    os.replace(private, private.with_name(f"{private.name}.old"))
    os.replace(private.with_name(f"{private.name}.new"), private)
    return public
