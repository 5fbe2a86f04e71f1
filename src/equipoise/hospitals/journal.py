"""Replies of the round in progress on the server's disk: after a crash the server reads them before it asks any
site."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from equipoise.contract.protocol import Payload, Value
from equipoise.core.storage import checked_text, read_checked, write_text
from equipoise.engine.payload_files import SpilledPayload, read_payload, safe_name, write_payload
from equipoise.engine.slot import Outcome
from equipoise.hospitals.parcels import read_counts


@dataclass(frozen=True)
class Answer:
    """What came back from a site, and whether the site wrote a new version of its state."""

    outcome: Outcome
    kept: bool

    @classmethod
    def of(cls, payload: Mapping[str, Value], noted: Mapping[str, Any]) -> Answer:
        """An answer from a payload and what its header notes beside it."""
        return cls(Outcome(payload, None, read_counts(noted["measures"]), dict(noted["facts"])), bool(noted["kept"]))


class Journal:
    """Accepted replies of the round in progress, on the server's disk; with `keep` those of all rounds stay there."""

    def __init__(self, folder: Path, keep: bool = False):
        self.folder = folder
        self.keep = keep

    def keep_only(self, round_number: int) -> None:
        """Forget other rounds."""
        for path in self.folder.glob("*") if not self.keep else ():
            if not path.name.startswith(f"{round_number:05d}-"):
                path.unlink()

    def find(self, version: str, site: str, identity: str) -> Answer | None:
        """The journaled reply to this very message; if a single bit of it is damaged, the server asks again."""
        path = self._path(version, site, identity)
        try:
            noted = read_checked(path.with_suffix(".json").read_bytes())
            read_payload(path)  # for its checksum: what is spilled is read piece by piece
            return Answer.of(SpilledPayload(path), noted)
        except (OSError, ValueError, KeyError, SafetensorError):
            return None

    def write(self, version: str, site: str, identity: str, payload: Payload, noted: dict[str, Any]) -> Answer:
        """Journal a reply; the answer reads its tensors from the file, so memory does not grow with sites."""
        path = self._path(version, site, identity)
        write_payload(path, payload)
        write_text(path.with_suffix(".json"), checked_text(noted))
        return Answer.of(SpilledPayload(path), noted)

    def close(self) -> None:
        """The run is over."""
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, version: str, site: str, identity: str) -> Path:
        return self.folder / f"{version}-{safe_name(site)}-{identity}.safetensors"
