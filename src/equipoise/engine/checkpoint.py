"""Checkpoints: one folder per retained round, complete or not there, and the manifest that names site versions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from equipoise.engine.files import read_payload, write_payload, write_text
from equipoise.engine.protocol import Payload, Value
from equipoise.errors import UserError


@dataclass
class Manifest:
    """What a checkpoint says besides tensors."""

    round: int
    digest: str
    events: int
    """Bytes of events.jsonl that belong to this round and those before it."""
    sites: dict[str, str] = field(default_factory=dict)
    selection: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def _path(self, round_number: int) -> Path:
        return self.folder / f"round-{round_number:05d}"

    def rounds(self) -> list[int]:
        """Rounds on disk, oldest first."""
        return sorted(int(path.name.removeprefix("round-")) for path in self.folder.glob("round-?????"))

    def save(self, manifest: Manifest, server: Mapping[str, Value], scores: Mapping[str, Value]) -> None:
        """Write a checkpoint under a temporary name, then rename the whole folder.

        `scores` are test scores that the end of the run will need (the mean of the last rounds).
        """
        final = self._path(manifest.round)
        temporary = final.with_name(final.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        write_payload(temporary / "server.safetensors", server)
        write_payload(temporary / "scores.safetensors", scores)
        write_text(temporary / "manifest.json", json.dumps(asdict(manifest), indent=1))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)

    def manifest(self, round_number: int) -> Manifest:
        """A checkpoint's manifest."""
        return Manifest(**json.loads((self._path(round_number) / "manifest.json").read_text()))

    def server(self, round_number: int) -> Payload:
        """A checkpoint's server state."""
        return read_payload(self._path(round_number) / "server.safetensors")

    def scores(self, round_number: int) -> Payload:
        """Test scores kept for the end of the run."""
        return read_payload(self._path(round_number) / "scores.safetensors")

    def latest(self, digest: str) -> Manifest | None:
        """The last complete checkpoint of this config; a checkpoint of another config is refused."""
        rounds = self.rounds()
        if not rounds:
            return None
        manifest = self.manifest(rounds[-1])
        if manifest.digest != digest:
            raise UserError(
                f"{self.folder.parent} holds a run of another config (digest {manifest.digest}, this one is {digest}); "
                "resume with the same settings, or choose another --out"
            )
        return manifest

    def retain(self, wanted: set[int]) -> list[Manifest]:
        """Delete all other checkpoints; gives the manifests of those that stay."""
        for round_number in set(self.rounds()) - wanted:
            shutil.rmtree(self._path(round_number))
        for leftover in self.folder.glob("*.tmp"):
            shutil.rmtree(leftover)
        return [self.manifest(round_number) for round_number in self.rounds()]
