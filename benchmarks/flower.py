"""What a round costs between processes on Flower, beside the local engine: seconds, bytes, and where the time goes.

    python benchmarks/flower.py [--sites 2 4 8] [--rounds 4] [--net resnet18]

Every site is a process of its own on this machine, with TLS, and stays warm: it is started once, not for every
message. The phantom's images are few, so that what is left of a round is Flower's share: looking for messages,
encoding, and moving bytes. Writes results/benchmarks/flower.json and prints two Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from flwr.superlink.grid import HttpGrid

from equipoise.contract.config import Config
from equipoise.engine.runs import make_config, prepare_run
from equipoise.hospitals import exchange as hospitals
from equipoise.hospitals import journal, post
from equipoise.hospitals.coordinator import conduct, running_superlink
from equipoise.hospitals.deployment_files import ServerFile
from equipoise.hospitals.pilot import lay_out, running_sites

RESULTS = Path(__file__).parent.parent / "results" / "benchmarks" / "flower.json"
SITE_LINE = re.compile(r"a message: ([\d.]+) s to take, ([\d.]+) s to answer, ([\d.]+) s to hand over")
#: what the server does with its time, in the order of a round; the rest of a round is bookkeeping
AT_SERVER = ("encode", "push", "wait", "pull", "decode", "journal", "merge")
WAITING = ("site: take", "site: train", "site: open and store", "site: hand over", "poll and move")


def config_of(sites: int, rounds: int, net: str) -> Config:
    """A few steps of FedAvg on small images."""
    phantom = {"sites": sites, "images": 60 * sites, "size": 32}
    return make_config(
        None,
        ["train.steps=2", "train.batch_size=8", f"evaluation.every={rounds}", "evaluation.trained=false"],
        method="fedavg",
        net={"name": net},
        data={"phantom": phantom},
        train={"rounds": rounds},
        compute={"device": "cpu"},
    )


class Clock:
    """Adds up the seconds of some functions, and notes the sums after every round. An observer of the run."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.rounds: list[dict[str, float]] = []
        self.began = time.perf_counter()
        self.started = 0.0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed; what it calls that is timed too counts there alone."""

        def run(*given: Any, **named: Any) -> Any:
            before, others = time.perf_counter(), sum(self.sums.values())
            try:
                return function(*given, **named)
            finally:
                inner = sum(self.sums.values()) - others
                self.sums[name] += time.perf_counter() - before - inner

        return run

    def event(self, event: str, **fields: Any) -> None:
        """Close a round; the first evaluation belongs to none."""
        if event == "connected" and not fields["missing"]:
            self.started = time.perf_counter() - self.began
        if event == "round":
            self.rounds.append(dict(self.sums))
        if event in ("round", "evaluation"):
            self.sums.clear()


@contextmanager
def timing(clock: Clock) -> Iterator[None]:
    """Time the parts of a round at the server."""
    places = [
        (hospitals.Packer, "prepare", "encode"),
        (post.RecordMaker, "make", "encode"),
        (HttpGrid, "push_messages", "push"),
        (post.GridPost, "_pull", "pull"),
        (post, "from_records", "decode"),
        (hospitals, "open_parcel", "decode"),
        (journal.Journal, "write", "journal"),
        (post.GridPost, "_deliver", "wait"),
        (post.GridPost, "_present", "wait"),
    ]
    with ExitStack() as stack:
        for owner, name, label in places:
            stack.enter_context(patch.object(owner, name, clock.timed(label, getattr(owner, name))))
        yield


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The events of the rounds after the first, which is also charged with the evaluation before it."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "round" and line["round"] > 1]


def summary(sites: int, engine: str, folder: Path) -> dict[str, Any]:
    """The medians of a run's rounds. Local sites train one after another, those on Flower at the same time."""
    rounds = rounds_of(folder)
    join = sum if engine == "local" else max
    return {
        "sites": sites,
        "engine": engine,
        "seconds_per_round": median(r["seconds"] for r in rounds),
        "training_seconds": median(join(site["seconds"] for site in r["sites"].values()) for r in rounds),
        "bytes_down_per_site": median(site["received"] for r in rounds for site in r["sites"].values()),
        "bytes_up_per_site": median(site["sent"] for r in rounds for site in r["sites"].values()),
    }


def parts_of_a_round(clock: Clock, result: dict[str, Any], logs: list[Path]) -> dict[str, float]:
    """Seconds of a median round by what they went into."""
    total, rounds = result["seconds_per_round"], clock.rounds[1:]
    parts = {name: median(r.get(name, 0.0) for r in rounds) for name in AT_SERVER if name != "merge"}
    parts["merge and bookkeeping"] = max(total - sum(parts.values()), 0.0)
    work = [[float(x) for x in m] for log in logs for m in SITE_LINE.findall(log.read_text())[2:-2]]
    take, answer, hand = (median(row[i] for row in work) for i in range(3))
    training = min(result["training_seconds"], answer)
    at_site = dict(zip(WAITING, (take, training, answer - training, hand)))
    waited = parts.pop("wait")
    return {**parts, **at_site, "poll and move": max(waited - sum(at_site.values()), 0.0)}


def measure(sites: int, rounds: int, net: str, folder: Path) -> list[dict[str, Any]]:
    """The same config on both engines."""
    config, clock = config_of(sites, rounds, net), Clock()
    local = folder / "local"
    prepare_run(config, local).execute()
    server, files = lay_out(folder / "consortium", config)
    settings = ServerFile.read(server)
    with timing(clock), running_superlink(settings, insecure=False) as superlink, running_sites(files):
        apart = conduct(config, settings, folder / "flower", superlink, observers=[clock])
    result = summary(sites, "flower", apart)
    logs = [file.with_name("site.log") for file in files.values()]
    result["seconds_until_all_sites_are_connected"] = clock.started
    result["parts"] = parts_of_a_round(clock, result, logs)
    return [summary(sites, "local", local), result]


def print_tables(results: list[dict[str, Any]]) -> None:
    """Rounds of both engines, then the shares of a round on Flower."""
    print("| sites | engine | s/round | training s | MB down/site | MB up/site |\n|---|---|---|---|---|---|")
    for r in results:
        numbers = (r["bytes_down_per_site"] / 1e6, r["bytes_up_per_site"] / 1e6)
        seconds = f"{r['seconds_per_round']:.2f} | {r['training_seconds']:.2f}"
        print(f"| {r['sites']} | {r['engine']} | {seconds} | {numbers[0]:.1f} | {numbers[1]:.1f} |")
    apart = [r for r in results if "parts" in r]
    print("\n| where a round's time goes | " + " | ".join(f"{r['sites']} sites" for r in apart) + " |")
    print("|---|" + "---|" * len(apart))
    for name in apart[0]["parts"]:
        cells = (f"{r['parts'][name]:.2f} s ({r['parts'][name] / r['seconds_per_round']:.0%})" for r in apart)
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--net", default="resnet18")
    parser.add_argument("--out", type=Path, default=RESULTS.parent)
    parser.add_argument("--quick", action="store_true", help="two sites and a small net, to try the script")
    options = parser.parse_args()
    if options.quick:
        options.sites, options.rounds, options.net = [2], 3, "small-cnn"
    results: list[dict[str, Any]] = []
    for sites in options.sites:
        with tempfile.TemporaryDirectory() as folder:
            results += measure(sites, options.rounds, options.net, Path(folder))
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    record = {"net": options.net, "rounds": options.rounds, "machine": machine, "results": results}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / RESULTS.name).write_text(json.dumps(record, indent=1) + "\n")
    print_tables(results)


if __name__ == "__main__":
    main()
