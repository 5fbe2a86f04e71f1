"""What a round costs between processes on Flower: seconds, CPU seconds and bytes, beside a minimal Flower app.

    python benchmarks/flower.py [--sites 2 4 8 16] [--rounds 4] [--net vgg16-slim] [--before COMMIT] [--quick]
        [--out results/benchmarks]

Every site is a process on this machine. Ours keep TLS, keys and signatures, and stay warm between messages. The minimal
app (`peers/minimal_flower`) has none of these, and Flower's usual tools run it. All send the same net and take two
steps in a round, so that what is left is the cost of moving models. Sides take turns at each number of sites. The first
round is left out. CPU seconds are of all processes, read from /proc. Writes flower.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from earlier import environment, sources
from equipoise.hospitals.processes import Child, flower_environment, free_port
from watch import family_cpu

HERE = Path(__file__).parent
APP = HERE / "peers" / "minimal_flower"
#: our pilot on Flower, by this tree and by earlier ones; prints when rounds ended
OURS = """
import json, sys, time
from pathlib import Path
try:
    from equipoise.engine.runs import make_config
    from equipoise.hospitals.coordinator import conduct, running_superlink
    from equipoise.hospitals.deployment_files import ServerFile
    from equipoise.hospitals.pilot import lay_out, running_sites
except ImportError:  # before these packages
    from equipoise.runs import make_config
    from equipoise.deploy.pilot import lay_out, running_sites
    from equipoise.deploy.server import conduct, running_superlink
    from equipoise.deploy.settings import ServerFile
sites, rounds, net, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
settings = ["train.steps=2", "train.batch_size=8", f"evaluation.every={rounds}", "evaluation.trained=false"]
settings += [f"data.phantom.sites={sites}", f"data.phantom.images={60 * sites}", "data.phantom.size=32"]
config = make_config(None, [*settings, f"train.rounds={rounds}", f"net.name='{net}'", "compute.device='cpu'"])
ended = []
class Clock:
    def event(self, event, **fields):
        if event == "round":
            up, down = ([site[way] for site in fields["sites"].values()] for way in ("sent", "received"))
            ended.append({"ended": time.time(), "up": sum(up) / len(up), "down": sum(down) / len(down)})
server, files = lay_out(folder / "consortium", config)
settings = ServerFile.read(server)
with running_superlink(settings, insecure=False) as superlink, running_sites(files):
    conduct(config, settings, folder / "run", superlink, observers=[Clock()])
(folder / "times.json").write_text(json.dumps(ended))
"""
#: seconds between two looks at CPU seconds
INTERVAL = 0.1
PATIENCE = 1800.0


class CpuClock(threading.Thread):
    """Notes the CPU seconds of all processes that descend from this one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.seconds: list[float] = []
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Look again and again."""
        while not self.ended.wait(INTERVAL):
            self.times.append(time.time())
            self.seconds.append(family_cpu())

    def at(self, moment: float) -> float:
        """CPU seconds up to a moment."""
        return self.seconds[max(bisect_right(self.times, moment) - 1, 0)]


def run_ours(source: Path, sites: int, rounds: int, net: str, folder: Path) -> Path:
    """Our sites and server; gives the file of times."""
    command = [sys.executable, "-c", OURS, str(sites), str(rounds), net, str(folder)]
    done = subprocess.run(
        command, env=environment(source), capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return folder / "times.json"


def run_minimal(source: Path, sites: int, rounds: int, net: str, folder: Path) -> Path:
    """The minimal app on Flower's own processes, as its documents tell; gives the file of times."""
    binary, port, times = Path(sys.executable).parent, free_port(), folder / "times.json"
    env = {**environment(source), **flower_environment(folder / "flwr")}
    env["PATH"] = f"{binary}{os.pathsep}{env['PATH']}"
    address = f"127.0.0.1:{port}"
    (folder / "flwr").mkdir()
    (folder / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
    )
    link = [f"{binary}/flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    with ExitStack() as stack:
        stack.enter_context(Child([*link, "--disable-runtime-dependency-installation"], folder / "link.log", env))
        _wait_until_up(address)
        for site in range(sites):
            node = [f"{binary}/flower-supernode", "--insecure", "--superlink", address, "--port", str(free_port())]
            stack.enter_context(Child(node, folder / f"node{site}.log", env))
        config = f"rounds={rounds} sites={sites} net='{net}' times='{times}'"
        command = [f"{binary}/flwr", "run", str(APP), "here", "--stream", "--run-config", config]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE)
    told = json.loads(times.read_text()) if times.exists() else []
    if len(told) < rounds:  # Flower's command ends with 0 also where the server failed
        raise SystemExit(f"the minimal app did not end:\n{(done.stdout + done.stderr)[-2000:]}")
    return times


def _wait_until_up(address: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://{address}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    raise SystemExit("Flower's SuperLink did not start")


def measure(side: str, source: Path, sites: int, rounds: int, net: str) -> dict[str, Any]:
    """A side at one number of sites: the medians of its rounds after the first."""
    clock = CpuClock()
    with tempfile.TemporaryDirectory() as folder:
        run = run_minimal if side == "minimal" else run_ours
        told: list[dict[str, float]] = json.loads(run(source, sites, rounds, net, Path(folder)).read_text())
    clock.ended.set()
    clock.join()
    ends = [row["ended"] for row in told]
    return {
        "side": side,
        "sites": sites,
        "seconds_per_round": median(after - before for before, after in pairwise(ends)),
        "cpu_s_per_round": (clock.at(ends[-1]) - clock.at(ends[0])) / (len(ends) - 1),
        "mb_down_per_site": mean(row["down"] for row in told[1:]) / 1e6,
        "mb_up_per_site": mean(row["up"] for row in told[1:]) / 1e6,
        "load": round(os.getloadavg()[0], 1),
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line for each side at the last number of sites."""
    for row in rows:
        print(
            f"{row['sites']:>3} sites {row['side']:<8} {row['seconds_per_round']:6.2f} s and "
            f"{row['cpu_s_per_round']:6.2f} CPU s a round, {row['mb_down_per_site']:5.1f} MB down, "
            f"{row['mb_up_per_site']:5.1f} MB up, load {row['load']:.0f}",
            flush=True,
        )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--net", default="vgg16-slim")
    parser.add_argument("--before", default="", help="a commit to measure in turns with this tree")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "benchmarks")
    parser.add_argument("--quick", action="store_true", help="two sites and a small net, to try the script")
    options = parser.parse_args()
    if options.quick:
        options.sites, options.rounds, options.net = [2], 2, "small-cnn"
    command = "python benchmarks/flower.py" + (f" --before {options.before}" if options.before else "")
    command += f" --net {options.net} --rounds {options.rounds}"
    record: dict[str, Any] = {
        "command": command,
        "net": options.net,
        "rounds": options.rounds,
        "before_commit": options.before,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "results": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    with sources(options.before) as found:
        for sites in options.sites:
            for side, source in {"minimal": found["after"], **found}.items():
                record["results"].append(measure(side, source, sites, options.rounds, options.net))
                show(record["results"][-1:])
                (options.out / "flower.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
