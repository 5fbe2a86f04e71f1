"""One run on one device, and with its sites spread over several: CPU seconds, wall seconds, and a model of the scaling.

    python benchmarks/spread.py [--devices 2] [--repeats 3] [--quick] [--out results/benchmarks]

Here a device is a process on a CPU of one thread; both sides give the same bits. The two take turns, and each is a
fresh process. Where other programs use the cores, wall seconds say nothing: CPU seconds of all processes show what
spreading costs. The model tells how much of linear scaling is left on idle devices:

    share = T / (n * (max over devices of their sites' seconds + server's seconds)),  T = all sites' seconds + server's

The seconds of each site in a round are those that the run's log tells, and sites are dealt as the engine deals them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earlier import environment, sources
from equipoise.engine.worker_pool import deal
from watch import watch

SETTINGS = (
    "net.name='small-cnn'",
    "train.rounds=3",
    "train.epochs=3",
    "data.phantom.sites=8",
    "data.phantom.images=960",
)
QUICK = ("net.name='small-cnn'", "train.rounds=2", "train.steps=2", "data.phantom.sites=4", "data.phantom.images=160")
#: devices that the model is asked about
MODELLED = (2, 4, 8)
ROUND = """
import sys, time
from pathlib import Path
from equipoise.engine.runs import make_config, prepare_run
config = make_config(None, [*sys.argv[2:], "data.phantom.size=32", "evaluation.every=100", "evaluation.trained=false"])
prepare_run(config, Path(sys.argv[1])).execute()
"""


def run(device: str, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """One run in a fresh process, seen from outside."""
    with sources("") as found:
        command = [sys.executable, "-c", ROUND, str(folder / "run"), *settings, f"compute.device='{device}'"]
        usage = watch(command, folder / "log.txt", environment(found["after"]))
    if usage.code:
        raise SystemExit((folder / "log.txt").read_text()[-2000:])
    lines = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    rounds = [line for line in lines if line["event"] == "round"]
    return {"wall_s": usage.wall_s, "cpu_s": usage.cpu_s, "rounds": rounds}


def modelled(sites: Mapping[str, Mapping[str, float]], whole: float, devices: int) -> float:
    """The share of linear scaling in a round of these sites that takes `whole` seconds on one device."""
    seconds = [facts["seconds"] for facts in sites.values()]
    images = [facts["examples"] for facts in sites.values()]  # the engine deals by images
    server = max(whole - sum(seconds), 0.0)
    longest = max(sum(seconds[place] for place in share) for share in deal(images, devices))
    return whole / (devices * (longest + server))


def main() -> None:
    """Measure in turns, print and write `spread.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one turn of a small run, to try the script")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    options = parser.parse_args()
    settings = QUICK if options.quick else SETTINGS
    turns = []
    for _ in range(1 if options.quick else options.repeats):
        turn = {}
        for device in ("cpu", f"cpu:{options.devices}"):
            with tempfile.TemporaryDirectory() as folder:
                turn[device] = run(device, settings, Path(folder))
        one, spread = turn.values()
        turns.append(
            {
                "cpu_ratio": spread["cpu_s"] / one["cpu_s"],
                "wall_ratio": spread["wall_s"] / one["wall_s"],
                "round_ratio": spread["rounds"][-1]["seconds"] / one["rounds"][-1]["seconds"],
                "model": [modelled(r["sites"], r["seconds"], n) for n in MODELLED for r in one["rounds"][-1:]],
            }
        )
        print(turns[-1], f"load {os.getloadavg()[0]:.0f}", flush=True)
    middle = {key: statistics.median(turn[key] for turn in turns) for key in turns[0] if key != "model"}
    models = {n: statistics.median(turn["model"][place] for turn in turns) for place, n in enumerate(MODELLED)}
    command = f"python benchmarks/spread.py --devices {options.devices} --repeats {options.repeats}"
    result = {"command": command, "devices": options.devices, **middle, "model": models}
    result |= {"sites": len(one["rounds"][-1]["sites"]), "turns": len(turns), "load": os.getloadavg()[0]}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "spread.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
