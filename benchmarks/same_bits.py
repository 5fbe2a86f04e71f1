"""Whether two commits compute the same bits: every method and every switch, one worker, two, and resumed.

    python benchmarks/same_bits.py REV [REV2] [--here] [--only REGEX] [--ways a,b] [--quick] [--list] [--cache DIR]

REV2 is the commit that is checked out, unless it is given; `--here` takes the files of this folder as they lie, and a
path takes another folder's. The old commit runs each case once. The new commit must give the same tensors and scores:

- one: in one process
- workers: with two worker processes (forked, to save their start; `spawned` begins them as users' runs do)
- resumed: from its second round on
- continued: from the second round of the old commit's run on

It exits with 0 where all are equal, and with 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bits.cases import Case, all_cases, quick
from bits.compare import count, differences
from bits.sides import Failed, Side, Source, checked_out, machine, running

HERE = Path(__file__).resolve().parents[1]
WAYS = ("one", "workers", "resumed", "continued", "spawned")
#: the exit status of a command line that Equipoise refuses
REFUSED = 2
#: what a run that stopped in its third round would not have
LATER = ("checkpoints/round-00003", "models", "report.html", "report.csv", "report.tex")
SHOWN = 12


def cut(run: Path, folder: Path) -> Path:
    """A copy of a finished run that ended in the middle of its last round."""
    shutil.copytree(run, folder)
    for name in LATER:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return folder


class Comparison:
    """Runs the cases of both sides and counts what is equal."""

    def __init__(self, old: Side, new: Side, scratch: Path, cache: Path | None, ways: Sequence[str]):
        self.old, self.new, self.scratch, self.ways = old, new, scratch, ways
        self.references = scratch / "old" if cache is None else cache
        self.total = self.equal = self.tensors = self.refused = 0
        self.different: list[str] = []

    def reference(self, case: Case) -> tuple[Path, int]:
        """The old commit's run of a case, and its exit status."""
        folder = self.references / case.slug
        ended = folder / "status"
        if not ended.exists():
            shutil.rmtree(folder, ignore_errors=True)
            status, text = self.old.run(*case.arguments, "--out", folder).result()
            if status not in (0, REFUSED):
                print(f"{case.name}: {self.old.source.title} fails with status {status}: {text[-2000:]}", flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            ended.write_text(str(status))
        return folder, int(ended.read_text())

    def compare(self, case: Case) -> list[str]:
        """One case in all ways; gives lines about what differs."""
        reference, expected = self.reference(case)
        folder = self.scratch / "new" / case.slug
        found: list[str] = []
        self.refused += expected == REFUSED
        for way in self.ways if not expected else self.ways[:1]:
            lines = list(self._way(case, way, reference, expected, folder))
            self.total += 1
            self.equal += not lines
            found += [f"{case.name} [{way}] {line}" for line in lines[:SHOWN]]
            if len(lines) > SHOWN:
                found.append(f"{case.name} [{way}] and {len(lines) - SHOWN} more")
        shutil.rmtree(folder, ignore_errors=True)
        return found

    def _way(self, case: Case, way: str, reference: Path, expected: int, folder: Path) -> Iterator[str]:
        own = folder / way
        command = [*case.arguments, "--out", str(own)]
        if way in ("workers", "spawned"):
            command += ["--workers", "2"]
        elif way in ("resumed", "continued"):
            straight = self._straight(case, folder) if way == "resumed" else reference
            if not (straight / "models").is_dir():
                yield "the run to go on with did not finish"
                return
            cut(straight, own)
            command.append("--resume")
        status, text = self.new.run(*command, spawn=way == "spawned").result()
        if status != expected or status not in (0, REFUSED):
            yield f"exit status {expected} has become {status}: {' '.join(text.split())[-400:]}"
        elif not expected:
            self.tensors += count(reference)
            yield from differences(reference, own)

    def _straight(self, case: Case, folder: Path) -> Path:
        """The new commit's undisturbed run, which `one` may have made already."""
        own = folder / "one"
        if not own.exists():
            self.new.run(*case.arguments, "--out", own).result()
        return own

    def run(self, cases: Iterable[Case], processes: int) -> None:
        """Compare cases, some at a time, and say what differs as it is found."""
        with ThreadPoolExecutor(2 * processes) as threads:
            for lines in threads.map(self.compare, cases):
                self.different += lines
                for line in lines:
                    print(line, flush=True)


def chosen(side: Side, options: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    cases = all_cases(side)
    if options.quick:
        cases = quick(cases)
    cases = [case for case in cases if re.search(options.only, case.name)]
    if not cases:
        raise Failed(f"no case matches --only {options.only}")
    return cases


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="REV", help="a commit, or a folder")
    parser.add_argument("new", metavar="REV2", nargs="?", default="HEAD", help="a commit, or a folder")
    parser.add_argument("--here", action="store_true", help="compare with this folder's files as they lie")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--ways", default="", help=f"of {','.join(WAYS)}; default: all but the last")
    parser.add_argument("--quick", action="store_true", help="a dozen cases, one way")
    parser.add_argument("--list", action="store_true", help="name the cases and run nothing")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the old commit's runs there")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of each commit")
    options = parser.parse_args(arguments)
    options.ways = options.ways.split(",") if options.ways else ["one"] if options.quick else list(WAYS[:-1])
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"no such way: {', '.join(sorted(unknown))}")
    return options


def cache_of(old: Source, folder: Path | None) -> Path | None:
    """Where the old commit's runs are kept; a folder's content may change, so nothing of it is."""
    return folder.resolve() / f"{old.commit[:12]}-{machine()}" if folder and old.commit else None


def compare(options: argparse.Namespace, scratch: Path) -> int:
    began = time.monotonic()
    old = checked_out(options.old, HERE, scratch)
    new = checked_out(str(HERE) if options.here else options.new, HERE, scratch)
    with (
        running(old, scratch / "old.log", options.processes) as before,
        running(new, scratch / "new.log", options.processes) as after,
    ):
        cases = chosen(before, options)
        if options.list:
            print("\n".join(case.name for case in cases))
            print(f"{len(cases)} cases")
            return 0
        print(f"{old.title} against {new.title}: {len(cases)} cases, ways: {', '.join(options.ways)}", flush=True)
        comparison = Comparison(before, after, scratch, cache_of(old, options.cache), options.ways)
        comparison.run(cases, options.processes)
    print(
        f"{comparison.equal} of {comparison.total} equal ({len(cases)} cases, {comparison.refused} of them refused, "
        f"{comparison.tensors} tensors) in {time.monotonic() - began:.0f} s"
    )
    return int(comparison.equal < comparison.total)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; gives the exit status."""
    options = parsed(arguments)
    with tempfile.TemporaryDirectory(prefix="same-bits-") as scratch:
        try:
            return compare(options, Path(scratch))
        except Failed as problem:
            print(f"same_bits: {problem}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
