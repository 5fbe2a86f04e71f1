"""Injects faults into small runs and says whether anything was lost: `python benchmarks/faults.py --faults 200`.

    python benchmarks/faults.py [--seed S] [--faults N] [--methods a,b] [--kinds a,b] [--processes P] [--replay NUMBER]

A run is broken off, its files are damaged, its messages are lost or false. Then it goes on. It must end with the bits
of an undisturbed run, refuse in words, or leave the site out and report this.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from campaign.faults import BAD, GOOD, KINDS, Fault, faults, fresh, judge, operations
from campaign.places import World

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "minutes; tests/test_faults.py tries its parts"

METHODS = ("fedavg", "fedbn", "fediic", "fednpr-per", "fedbm", "prr", "scaffold", "fedrep", "local")


@cache
def undisturbed(place: str, method: str) -> tuple[dict[str, Any], int]:
    """What an undisturbed run leaves, and how many operations on files it has."""
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        world = World(place, method, Path(scratch))
        count = operations(world)
        return world.left(), count


def verdict(fault: Fault) -> tuple[Fault, str, str]:
    """A fault, how it ended, and details."""
    reference, count = undisturbed(fault.place, fault.method)
    scratch = Path(tempfile.mkdtemp(prefix="fault-"))
    try:
        return fault, *judge(fault, fresh(scratch / "world"), reference, count)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def campaign(chosen: list[Fault], processes: int = 1) -> list[tuple[Fault, str, str]]:
    """The verdicts on some faults, in their order."""
    if processes == 1:
        return [verdict(fault) for fault in chosen]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(verdict, chosen, chunksize=8)


def table(verdicts: list[tuple[Fault, str, str]]) -> str:
    """Verdicts by kind, as a Markdown table."""
    ends = [*GOOD, *BAD]
    rows = [f"| kind | faults | {' | '.join(ends)} |", f"| --- | ---: |{' ---: |' * len(ends)}"]
    for kind in [*KINDS, "all"]:
        found = Counter(how for fault, how, _ in verdicts if kind in (fault.kind, "all"))
        if found:
            rows.append(f"| {kind} | {sum(found.values())} | {' | '.join(str(found[end]) for end in ends)} |")
    return "\n".join(rows)


def main() -> int:
    """Run a campaign and print what came of it; 1 where anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--replay", type=int, help="only the fault of this number")
    parser.add_argument("--out", type=Path, help="write the table and the failures here, as JSON")
    options = parser.parse_args()
    chosen = [*faults(options.seed, options.faults, options.methods.split(","), options.kinds.split(","))]
    if options.replay is not None:
        chosen = [fault for fault in chosen if fault.number == options.replay]
    verdicts = campaign(chosen, options.processes)
    print(table(verdicts))
    failed = [(fault, how, about) for fault, how, about in verdicts if how in BAD]
    for fault, how, about in failed if options.replay is None else verdicts:
        print(f"fault {fault.number} ({fault.kind}, {fault.place}, {fault.method}): {how}: {about}")
    if options.out:
        told = {"seed": options.seed, "faults": len(verdicts), "failed": len(failed), "table": table(verdicts)}
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
