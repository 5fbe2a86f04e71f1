"""Whether two commits compute the same bits: every method and every switch, one worker, two, and resumed.

    python benchmarks/same_bits.py REV [REV2] [--here] [--only REGEX] [--ways a,b] [--quick] [--list] [--cache DIR]

All settings of the new commit's runs are those that the old commit resolved: a default that changed is no bit that
changed. Changed defaults are listed first.

REV2 is the commit that is checked out, unless the command names another. `--here` takes the files of this folder with
uncommitted work. A path takes those of another folder. The old commit runs each case once. The new commit must give
the same tensors and scores:

- one: in one process
- workers: with two worker processes, forked to save their start
- spawned: with two worker processes that begin as users' do, for some cases
- resumed: from its second round on
- continued: from the second round of the old commit's run on
- folders: `report`, `predict`, `export` and `study` with folders of the old commit
- pilot: server and hospitals of an old pilot go on under the new commit, with their policies and what they kept

A difference is a line: case, way, file, tensor. Each cause is shown once. The last line is "N of N equal". The exit
status is 0 where all are equal, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bits.cases import SYSTEMS, Case, all_cases, changed_defaults, quick
from bits.continued import Folders
from bits.runs import Found, Reference, Runs
from bits.sides import Failed, Side, Source, checked_out, machine, running

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "two commits; tests/test_same_bits.py tries its parts"

HERE = Path(__file__).resolve().parents[1]
#: ways of running each case, and ways of using folders
RUN_WAYS = ("one", "workers", "resumed", "continued")
WAYS = (*RUN_WAYS, "spawned", "folders", "pilot")
#: lines about one comparison; further differences are counted
SHOWN = 3
#: cases and checks of folders between two lines about progress
TOLD = 25


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="REV", help="a commit, or a folder")
    parser.add_argument("new", metavar="REV2", nargs="?", default="HEAD", help="a commit, or a folder")
    parser.add_argument("--here", action="store_true", help="compare with this folder's files as they lie")
    parser.add_argument("--only", metavar="REGEX", help="cases whose name matches; no folders and no pilot")
    parser.add_argument("--ways", help=f"some of {','.join(WAYS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a dozen cases, one way")
    parser.add_argument("--list", action="store_true", help="name the cases and run nothing")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the old commit's runs there")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of each commit")
    options = parser.parse_args(arguments)
    default = ("one",) if options.quick else RUN_WAYS if options.only else WAYS
    options.ways = options.ways.split(",") if options.ways else list(default)
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"no such way: {', '.join(sorted(unknown))}")
    return options


def chosen(side: Side, options: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    cases = quick(all_cases(side)) if options.quick else all_cases(side)
    cases = [case for case in cases if re.search(options.only or "", case.name)]
    if not cases:
        raise Failed(f"no case matches --only {options.only}")
    return cases


def cache_of(old: Source, folder: Path | None, scratch: Path) -> Path:
    """Where the old commit's runs lie; those of a folder, whose content may change, are not kept."""
    kept = folder is not None and old.commit
    place = folder.resolve() / old.commit / machine() if folder and kept else scratch / "old"
    place.mkdir(parents=True, exist_ok=True)
    return place


def comparisons(
    old: Side, new: Side, cases: Sequence[Case], options: argparse.Namespace, scratch: Path
) -> Iterator[Found]:
    """Everything that is compared, a part at a time."""
    reference = Reference(old, cache_of(old.source, options.cache, scratch))
    ways = [way for way in options.ways if way in RUN_WAYS]
    if ways:
        yield from Runs(reference, new, scratch / "new", ways).compare(cases, 2 * options.processes)
    if "spawned" in options.ways:
        systems = [case for case in cases if case.name in SYSTEMS]
        yield from Runs(reference, new, scratch / "spawned", ["spawned"]).compare(systems, 1)
    folders = Folders(old, new, scratch, reference)
    for way in ("folders", "pilot"):
        for name, lines in getattr(folders, way)() if way in options.ways else ():
            found = Found()
            found.note(name, lines)
            yield found
    reference.forget()


def compare(options: argparse.Namespace, scratch: Path) -> int:
    """Compare and print; gives the exit status."""
    began = time.monotonic()
    old = checked_out(options.old, HERE, scratch)
    new = checked_out(str(HERE) if options.here else options.new, HERE, scratch)
    whole, told = Found(), Told()
    with (
        running(old, scratch / "old.log", options.processes) as before,
        running(new, scratch / "new.log", options.processes) as after,
    ):
        cases = chosen(before, options)
        if options.list:
            print("\n".join(case.name for case in cases))
            print(f"{len(cases)} cases")
            return 0
        print(f"{old.title} against {new.title}: {len(cases)} cases; {', '.join(options.ways)}", flush=True)
        if changed := changed_defaults(before, after):
            print(f"defaults that changed, so that the new commit runs with the old ones: {'; '.join(changed)}")
        for number, found in enumerate(comparisons(before, after, cases, options, scratch), 1):
            whole.add(found)
            for name, lines in found.unequal:
                told(name, lines)
            if number % TOLD == 0:
                print(f"  {number} parts, {whole.equal} of {whole.total} equal, {_since(began)}", flush=True)
    told.end()
    print(
        f"{whole.equal} of {whole.total} equal in {_since(began)}: {len(cases)} cases, {whole.refused} of them refused "
        f"by both; {whole.tensors} tensors"
    )
    return int(whole.equal < whole.total)


class Told:
    """Prints a cause of differences once, with the first comparison that has it, and at the end how many have it."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], list[str]] = {}

    def __call__(self, name: str, lines: Sequence[str]) -> None:
        """Take in the lines of a comparison; those that differ in numbers and names of tensors alone have one cause."""
        causes = [re.sub(r"model/\S+|\d[\d.e+-]*", "…", line) for line in lines[:SHOWN]]
        names = self._names.setdefault(tuple(dict.fromkeys(causes)), [])
        names.append(name)
        if len(names) == 1:
            more = [f"and {len(lines) - SHOWN} more differences"] if len(lines) > SHOWN else []
            print("\n".join(f"{name}: {line}" for line in [*lines[:SHOWN], *more]), flush=True)

    def end(self) -> None:
        """Name the comparisons that repeat an earlier one's cause."""
        for first, *names in self._names.values():
            if names:
                print(f"like {first}, {len(names)} more: {'; '.join(names)}")


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("same_bits: stopped"))  # and clean up
    sys.exit(main())
