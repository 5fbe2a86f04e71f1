"""What sites keep between asks, as immutable versions: a round commits them or rolls them back.

Versions lie in memory up to a budget and on disk beyond it; a checkpoint puts on disk all versions that it refers to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from equipoise.contract.protocol import Tensors
from equipoise.core.storage import settle
from equipoise.engine.payload_files import damage_named, read_payload, safe_name, write_payload

MEMORY_BUDGET = 1 << 29
#: the entry of a state file that holds what a site keeps
KEPT = "kept"


class Versions:
    """Names of the committed and pending versions of every site's kept tensors."""

    def __init__(self) -> None:
        self.committed: dict[str, str] = {}
        self.pending: dict[str, str] = {}

    def current(self, site: str) -> str | None:
        """The newest version of a site: this round's, or else the committed one."""
        return self.pending.get(site) or self.committed.get(site)

    def note(self, site: str, version: str) -> None:
        """Make a version the site's pending one, in place of an earlier one of this round."""
        if site in self.pending:
            self._drop(site, self.pending[site])
        self.pending[site] = version

    def commit(self) -> None:
        """The round is complete: pending versions become the committed ones."""
        self.committed |= self.pending
        self.pending = {}

    def rollback(self, sites: Iterable[str] | None = None) -> None:
        """Forget the pending versions of some sites, or of all."""
        for site in list(self.pending if sites is None else sites):
            if site in self.pending:
                self._drop(site, self.pending.pop(site))

    def flush(self) -> dict[str, str]:
        """Make sure that every committed version is on disk; gives {site: version} for the manifest."""
        return dict(self.committed)

    def restore(self, manifest: Mapping[str, str]) -> None:
        """Go back to the versions of a manifest."""
        self.committed, self.pending = dict(manifest), {}

    def check(self, manifest: Mapping[str, str]) -> None:
        """Find out whether the versions of a manifest that lie here can be read."""

    def collect(self, manifests: Iterable[Mapping[str, str]]) -> None:
        """Let go of versions that neither a retained checkpoint nor the present state refers to."""

    def _drop(self, site: str, version: str) -> None:
        """Let go of a version that will not be committed."""


class SiteStates(Versions):
    """Versions that lie in memory and on this machine's disk."""

    def __init__(self, folder: Path, budget: int = MEMORY_BUDGET):
        super().__init__()
        self.folder = folder
        self.budget = budget
        self._memory: dict[tuple[str, str], Tensors] = {}
        self._bytes = 0
        self._settled: set[tuple[str, str]] = set()

    def path(self, site: str, version: str) -> Path:
        """Where a version lies on disk."""
        return self.folder / safe_name(site) / f"{version}.safetensors"

    def load(self, site: str) -> Tensors | None:
        """The newest state of a site; None before its first."""
        version = self.current(site)
        if version is None:
            return None
        if (site, version) in self._memory:
            return self._memory[site, version]
        path = self.path(site, version)
        with damage_named(f"the state of {site} in {path}", "--resume goes on from the last checkpoint that is sound"):
            return read_state(path)

    def put(self, site: str, version: str, state: Tensors) -> None:
        """A site's next state, pending until the round is committed."""
        size = sum(t.numel() * t.element_size() for t in state.values())
        if self._bytes + size <= self.budget:
            self._memory[site, version] = state
            self._bytes += size
        else:
            write_state(self.path(site, version), state)
        self.note(site, version)

    def flush(self) -> dict[str, str]:
        """Put every committed version on disk; gives {site: version} for the manifest."""
        for site, version in self.committed.items():
            if (site, version) in self._settled:
                continue
            path, state = self.path(site, version), self._memory.get((site, version))
            if state is not None and not path.exists():
                write_state(path, state, durable=True)
            elif path.exists():  # else it is found missing on reading
                settle(path)
            self._settled.add((site, version))
        return super().flush()

    def check(self, manifest: Mapping[str, str]) -> None:
        """Find out whether the versions of a manifest can be read, and hold what was written: reads each."""
        for site, version in manifest.items():
            read_state(self.path(site, version))

    def restore(self, manifest: Mapping[str, str]) -> None:
        """Go back to the versions of a manifest."""
        super().restore(manifest)
        self._memory, self._bytes = {}, 0

    def collect(self, manifests: Iterable[Mapping[str, str]]) -> None:
        """Delete versions that neither a retained checkpoint nor the present state refers to."""
        present = set(self.committed.items()) | set(self.pending.items())
        self._settled &= present
        for key in self._memory.keys() - present:
            self._forget(key)
        retained = {(site, version) for manifest in manifests for site, version in manifest.items()}
        paths = {self.path(site, version) for site, version in retained | present}
        for path in self.folder.glob("*/*.safetensors*"):  # drafts of killed processes, too
            if path not in paths:
                path.unlink()

    def _forget(self, key: tuple[str, str]) -> None:
        state = self._memory.pop(key, None)
        if state is not None:
            self._bytes -= sum(t.numel() * t.element_size() for t in state.values())

    def _drop(self, site: str, version: str) -> None:
        self._forget((site, version))
        if self.committed.get(site) != version:
            self.path(site, version).unlink(missing_ok=True)


def write_state(path: Path, state: Tensors, durable: bool = False) -> None:
    """A site's kept tensors as one file."""
    write_payload(path, {KEPT: state}, durable)


def read_state(path: Path) -> Tensors:
    """The inverse of `write_state`."""
    state = read_payload(path)[KEPT]
    assert isinstance(state, dict)
    return state
