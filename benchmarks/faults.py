"""Injects faults into small runs and says whether anything was lost: `python benchmarks/faults.py --faults 200`.

    python benchmarks/faults.py [--seed S] [--faults N] [--methods a,b] [--kinds a,b] [--processes P] [--replay NUMBER]
    python benchmarks/faults.py --faults 5000 --log faults.jsonl --resume --out results/benchmarks

A run is broken off, its files are damaged, its messages are lost or false. Then it goes on. It must end with the bits
of an undisturbed run, refuse in words, or leave the site out and report this.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from campaign.faults import BAD, GOOD, KINDS, Fault, faults, fresh, judge, operations
from campaign.places import World

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "minutes; tests/test_faults.py tries its parts"

#: a fault, how it ended, details, CPU seconds
Verdict = tuple[Fault, str, str, float]
METHODS = ("fedavg", "fedbn", "fediic", "fednpr-per", "fedbm", "prr", "scaffold", "fedrep", "local")


@cache
def undisturbed(place: str, method: str) -> tuple[dict[str, Any], int]:
    """What an undisturbed run leaves, and how many operations on files it has."""
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        world = World(place, method, Path(scratch))
        count = operations(world)
        return world.left(), count


def verdict(fault: Fault) -> Verdict:
    """A fault, how it ended, details, and the CPU seconds that it took."""
    reference, count = undisturbed(fault.place, fault.method)
    scratch, before = Path(tempfile.mkdtemp(prefix="fault-")), cpu_seconds()
    try:
        how, about = judge(fault, fresh(scratch / "world"), reference, count)
        return fault, how, about, round(cpu_seconds() - before, 3)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def cpu_seconds() -> float:
    """CPU seconds of this process and of the processes that it waited for."""
    return sum(os.times()[:4])


def verdicts_on(chosen: list[Fault], processes: int = 1) -> Iterator[Verdict]:
    """The verdicts on some faults, in their order."""
    if processes == 1:
        yield from map(verdict, chosen)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap(verdict, chosen, chunksize=8)


class Log:
    """A file with a line for each verdict, so that a campaign can be stopped and go on. A fault's last line counts."""

    def __init__(self, path: Path):
        self.path, self.verdicts = path, dict[int, Verdict]()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a campaign was killed while it wrote its last line
            path.write_text(whole, encoding="utf-8")
        for line in whole.splitlines():
            how, about, seconds, *drawn = json.loads(line).values()
            self.verdicts[drawn[1]] = Fault(*drawn), how, about, seconds

    def write(self, found: Verdict) -> None:
        """Append a verdict."""
        fault, how, about, seconds = found
        self.verdicts[fault.number] = found
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"how": how, "about": about, "seconds": seconds, **asdict(fault)}) + "\n")

    def lacks(self, chosen: list[Fault]) -> list[Fault]:
        """The faults without a verdict, and those that did harm: they are tried again."""
        good = {fault for fault, how, *_ in self.verdicts.values() if how in GOOD}
        return [fault for fault in chosen if fault not in good]


def summary(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """How many faults of each kind ended how, and those that did harm."""
    told = list(verdicts)
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        found = Counter(how for fault, how, *_ in told if fault.kind == kind)
        if found:
            kinds[kind] = {"faults": found.total(), **{end: found[end] for end in (*GOOD, *BAD)}}
    return {
        "seeds": sorted({fault.seed for fault, *_ in told}),
        "faults": len(told),
        "cpu_seconds": round(sum(seconds for *_, seconds in told), 1),
        "places": dict(Counter(fault.place for fault, *_ in told)),
        "methods": dict(sorted(Counter(fault.method for fault, *_ in told).items())),
        "kinds": kinds,
        "harm": [asdict(fault) | {"how": how, "about": about} for fault, how, about, _ in told if how in BAD],
    }


def table(kinds: Mapping[str, Mapping[str, int]]) -> str:
    """Ends by kind, as a Markdown table."""
    rows = {**kinds, "all": {end: sum(row[end] for row in kinds.values()) for end in ("faults", *GOOD, *BAD)}}
    heads = ["faults", *GOOD, *BAD]
    lines = [f"| kind | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    return "\n".join(
        lines + [f"| {kind} | {' | '.join(str(row[head]) for head in heads)} |" for kind, row in rows.items()]
    )


def main() -> int:
    """Run a campaign and print what came of it; 1 where anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--replay", type=int, help="only the fault of this number")
    parser.add_argument("--log", type=Path, help="write a line for each verdict here")
    parser.add_argument("--resume", action="store_true", help="go on with the campaign of --log")
    parser.add_argument(
        "--out", type=Path, help="write faults.json in this folder: what the documentation's table shows"
    )
    options = parser.parse_args()
    if options.log and options.log.exists() and not options.resume:
        parser.error(f"{options.log} exists; add --resume to go on with it, or choose another file")
    log = Log(options.log or Path(tempfile.mkdtemp()) / "faults.jsonl")
    chosen = [*faults(options.seed, options.faults, options.methods.split(","), options.kinds.split(","))]
    if options.replay is not None:
        chosen = [fault for fault in chosen if fault.number == options.replay]
    for found in verdicts_on(log.lacks(chosen), options.processes):
        log.write(found)
        fault, how, about, _ = found
        if how in BAD or options.replay is not None:
            print(f"fault {fault.number} ({fault.kind}, {fault.place}, {fault.method}): {how}: {about}", flush=True)
    told = summary(log.verdicts.values())
    print(table(told["kinds"]))
    if options.out:
        (options.out / "faults.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 1 if told["harm"] else 0


if __name__ == "__main__":
    sys.exit(main())
