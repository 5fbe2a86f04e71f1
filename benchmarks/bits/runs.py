"""The runs of both commits: the old one's once, as the reference, and the new one's in every way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from bits.cases import Case
from bits.compare import count, differences
from bits.continued import cut
from bits.sides import Killed, Side

#: the exit status of a command line that Equipoise refuses; it has then written nothing
REFUSED = 2
#: how often a case is begun whose process ends
ATTEMPTS = 3


@dataclass
class Found:
    """What came of one comparison, or of several together."""

    total: int = 0
    equal: int = 0
    tensors: int = 0
    refused: int = 0
    #: what differs, with the comparisons in which it does
    unequal: list[tuple[str, list[str]]] = field(default_factory=list)

    def note(self, name: str, lines: Sequence[str], tensors: int = 0) -> None:
        """Count a comparison with the lines that tell what differs."""
        self.total += 1
        self.equal += not lines
        self.tensors += tensors
        if lines:
            self.unequal.append((name, list(lines)))

    def add(self, other: Found) -> None:
        """Count what another one has found."""
        self.total += other.total
        self.equal += other.equal
        self.tensors += other.tensors
        self.refused += other.refused
        self.unequal += other.unequal


class Reference:
    """Runs of the old commit, each made once; a cache keeps them for later comparisons."""

    def __init__(self, old: Side, folder: Path):
        self.old, self.folder = old, folder
        self._failed: dict[Case, Path] = {}

    def __call__(self, case: Case) -> Path:
        """The folder of a run; its file `status` holds the exit status."""
        folder = self._failed.get(case, self.folder / case.slug)
        return folder if folder.exists() else self._made(case, folder)

    def _made(self, case: Case, folder: Path) -> Path:
        draft = self.folder / f".{uuid4().hex}"  # another comparison may fill the same cache
        status, text = self.old.run(*case.arguments, "--out", draft).result()
        kept = status == 0 or (status == REFUSED and not draft.exists())
        draft.mkdir(parents=True, exist_ok=True)
        (draft / "status").write_text(str(status))
        (draft / "said").write_text(text)
        if not kept:  # it may have been an accident
            self._failed[case] = draft
            return draft
        try:
            os.rename(draft, folder)
        except OSError:
            shutil.rmtree(draft)
        return folder

    def forget(self) -> None:
        """Delete runs that failed."""
        for folder in self._failed.values():
            shutil.rmtree(folder)

    def status(self, case: Case) -> int:
        """The exit status of a run."""
        return int((self(case) / "status").read_text())

    def failed(self, case: Case) -> bool:
        """Whether a run broke off."""
        return case in self._failed

    def said(self, case: Case) -> str:
        """The last words of a run."""
        return _end((self(case) / "said").read_text())


class Runs:
    """Compares the new commit's runs with the reference."""

    def __init__(self, reference: Reference, new: Side, scratch: Path, ways: Sequence[str]):
        self.reference, self.new, self.scratch, self.ways = reference, new, scratch, ways

    def compare(self, cases: Iterable[Case], together: int) -> Iterator[Found]:
        """What is found in each case, in order."""
        with ThreadPoolExecutor(together) as threads:
            yield from threads.map(self.case, cases)

    def case(self, case: Case) -> Found:
        """One case in all ways; it is begun anew where something ends its process."""
        for _ in range(ATTEMPTS):
            try:
                return self.once(case)
            except Killed as problem:
                said = str(problem)
            finally:
                shutil.rmtree(self.place(case, ""), ignore_errors=True)
        found = Found()
        found.note(case.name, [said])
        return found

    def once(self, case: Case) -> Found:
        """One case in all ways."""
        found, status = Found(), self.reference.status(case)
        if status == REFUSED and not self.reference.failed(case):
            found.refused += 1
            found.note(f"{case.name} [refused]", list(self.refusal(case)))
        elif status:
            found.note(f"{case.name} [old]", [f"the old commit fails with {status}: {self.reference.said(case)}"])
        else:
            tensors = count(self.reference(case))
            if not tensors:
                found.note(f"{case.name} [old]", ["no tensor is where the comparison looks for them"])
            for way in self.ways:
                found.note(f"{case.name} [{way}]", list(self.way(case, way)), tensors)
        return found

    def held(self, case: Case) -> list[str]:
        """The new commit's command line: all settings are those that the old commit resolved, whatever defaults are."""
        return ["run", str(self.reference(case) / "config.toml"), *self.new.insists]

    def place(self, case: Case, way: str) -> Path:
        """The folder of a run of the new commit."""
        return self.scratch / case.slug / way

    def refusal(self, case: Case) -> Iterator[str]:
        """Where the old commit refuses a case, the new one does so too."""
        status, text = self.new.run(*case.arguments, "--out", self.place(case, "one")).result()
        if status != REFUSED:
            yield f"refused before, ends with {status} now: {_end(text)}"

    def way(self, case: Case, way: str) -> Iterator[str]:
        """In which tensors and scores one way of running parts from the reference."""
        own, command = self.place(case, way), self.held(case)
        if way in ("workers", "spawned"):
            command += ["--workers", "2"]
        elif way == "resumed":
            cut(self.straight(case), own)
            command += ["--resume"]
        elif way == "continued":
            cut(self.reference(case), own)
            command += ["--resume"]
        elif own.exists():
            yield from differences(self.reference(case), own)
            return
        status, text = self.new.run(*command, "--out", own, spawn=way == "spawned").result()
        if status:
            yield f"ends with status {status}: {_end(text)}"
        else:
            yield from differences(self.reference(case), own)

    def straight(self, case: Case) -> Path:
        """The new commit's undisturbed run; where that fails, the reference has to do, and `one` tells of it."""
        own = self.place(case, "one")
        if not own.exists():
            self.new.run(*self.held(case), "--out", own).result()
        return own if (own / "models").is_dir() else self.reference(case)


def _end(text: str) -> str:
    return " ".join(text.split())[-500:]
