"""Checkpoints: one folder per retained round, complete or not there, and the manifest that names site versions."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.contract.protocol import Payload, Value
from equipoise.core.errors import UserError
from equipoise.core.storage import checked_text, read_checked, settle, write_text
from equipoise.data.federation import Federation
from equipoise.engine.payload_files import DAMAGE, damage_named, read_payload, write_payload

#: what to do where nothing is left to go on from
REMEDY = "delete the folder to run it anew, or choose another --out"


@dataclass
class Manifest:
    """What a checkpoint says besides tensors."""

    round: int
    digest: str
    data: str
    """Its `fingerprint`; a run goes on only with the data it began with."""
    events: int
    """Bytes of events.jsonl that belong to this round and those before it."""
    sites: dict[str, str] = field(default_factory=dict)
    selection: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    log: str = ""
    """Checksum of these bytes of events.jsonl; older versions wrote none."""

    @property
    def selected(self) -> set[int]:
        """The rounds that stood chosen, for the federation or for single sites."""
        choices = [self.selection, *self.selection.get("sites", {}).values()]
        return {choice["round"] for choice in choices if "round" in choice}


def _read(text: bytes) -> Manifest:
    """The manifest of a text; older versions wrote no checksum.

    Raises:
        ValueError: where the text is damaged; or TypeError
    """
    return Manifest(**read_checked(text, lambda content: "log" in content))


def fingerprint(federation: Federation, parts: Collection[str] | None = None) -> str:
    """Identifies the images and labels of all sites, the common set and cohorts; of very many images, a sample.

    `parts` leaves out the others. Images of hospitals elsewhere are counted, not looked at.
    """
    digest = hashlib.sha256(repr(federation.classes).encode())
    for place in federation.places():
        for part, split in sorted(place.splits.items()):
            if parts is not None and (part not in parts or not len(split)):
                continue
            digest.update(f"{place.name}/{part}/{len(split)}".encode())
            for stretch in split.stretches():
                digest.update(np.ascontiguousarray(stretch).tobytes())
            digest.update(split.sample_digest())
    return digest.hexdigest()[:16]


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def _path(self, round_number: int) -> Path:
        return self.folder / f"round-{round_number:05d}"

    def rounds(self) -> list[int]:
        """Rounds on disk, oldest first."""
        names = (path.name.removeprefix("round-") for path in self.folder.glob("round-?????"))
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, manifest: Manifest, server: Mapping[str, Value], scores: Mapping[str, Value]) -> None:
        """Write a checkpoint under a temporary name, then rename the whole folder.

        `scores` are test scores that the end of the run will need (the mean of the last rounds).
        """
        final = self._path(manifest.round)
        temporary = final.with_name(final.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        write_payload(temporary / "server.safetensors", server, durable=True)
        write_payload(temporary / "scores.safetensors", scores, durable=True)
        write_text(temporary / "manifest.json", checked_text(asdict(manifest)))
        settle(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        settle(self.folder)

    def relabel(self, digest: str) -> None:
        """Make all checkpoints those of another config, which the same run goes on with."""
        for round_number in self.rounds():
            manifest = self.manifest(round_number)
            manifest.digest = digest
            write_text(self._path(round_number) / "manifest.json", checked_text(asdict(manifest)))

    def damage_named(self) -> AbstractContextManager[None]:
        """Says that a checkpoint is damaged, and what to do, where what it holds cannot be used."""
        return damage_named(f"a checkpoint in {self.folder.parent}", REMEDY)

    def manifest(self, round_number: int) -> Manifest:
        """A checkpoint's manifest."""
        found = _read((self._path(round_number) / "manifest.json").read_bytes())
        numbers, tables = (found.round, found.events), (found.sites, found.selection)
        if not all(isinstance(n, int) and n >= 0 for n in numbers) or not all(isinstance(t, dict) for t in tables):
            raise ValueError("its manifest makes no sense")
        return found

    def server(self, round_number: int) -> Payload:
        """A checkpoint's server state."""
        return read_payload(self._path(round_number) / "server.safetensors")

    def scores(self, round_number: int) -> Payload:
        """Test scores kept for the end of the run."""
        return read_payload(self._path(round_number) / "scores.safetensors")

    def latest(self, check_sites: Callable[[Mapping[str, str]], None]) -> Manifest | None:
        """The last checkpoint that can be read; a damaged one gives way to the one before it.

        `check_sites` reads the site versions that a manifest names.
        """
        damaged = []
        for round_number in reversed(self.rounds()):
            try:
                self.server(round_number)
                self.scores(round_number)
                found = self.manifest(round_number)
                check_sites(found.sites)
                return found
            except DAMAGE as problem:  # a file that may not be read is no reason to go back
                damaged.append(f"{self._path(round_number).name}: {problem}")
        if damaged:
            told = "; ".join(damaged)
            raise UserError(f"every checkpoint in {self.folder} is damaged ({told}); {REMEDY}")
        return None

    def settle(self, round_number: int) -> list[int]:
        """Delete checkpoints that a resumed run cannot use, and return their rounds: later ones that are damaged, and
        older ones without a list of their content."""
        useless = [number for number in self.rounds() if number > round_number or not self._legible(number)]
        for number in useless:
            shutil.rmtree(self._path(number))
        return useless

    def _legible(self, round_number: int) -> bool:
        try:
            self.manifest(round_number)
        except (OSError, ValueError, TypeError):
            return False
        return True

    def manifests(self) -> list[Manifest]:
        """The manifests of all checkpoints, oldest first."""
        return [self.manifest(round_number) for round_number in self.rounds()]

    def retain(self, keep: int) -> list[Manifest]:
        """Delete all but the last `keep` checkpoints and those of rounds that these had selected. A run needs both at
        its end, even if it resumes behind a damaged checkpoint. Returns the manifests of the kept ones."""
        recent = self.rounds()[-keep:]
        selected = [self.manifest(round_number).selected for round_number in recent]
        for round_number in set(self.rounds()) - set(recent).union(*selected):
            shutil.rmtree(self._path(round_number))
        for leftover in self.folder.glob("*.tmp"):
            shutil.rmtree(leftover)
        return self.manifests()
