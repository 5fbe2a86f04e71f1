"""The same CPU job on a plain loop, Equipoise and its peers, each in a fresh process, seen from outside.

    python benchmarks/cpu.py [--python-pfl PATH] [--python-flower PATH] [--python-nvflare PATH] [--python-fedlab PATH]
        [--repeats 3] [--reduced] [--out results/benchmarks]

The job: FedAvg, 10 sites of 200 images (3 x 32 x 32), a CNN of 544,840 parameters, one local epoch a round in
batches of 32, SGD, 5 rounds, no evaluation; one thread. All engines train the same batches from the same weights.
The peers (`pip install` pfl, "flwr[simulation]", nvflare, fedlab) may live in separate environments. An engine whose
interpreter is not named, or lacks it, is left out. Engines take turns, so that a busy machine slows all alike. NVFlare
starts a process for every site and round, which takes minutes: it has one turn.

Then two settings of Equipoise alone: two worker processes against one, and channels-last memory against the usual.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.core.streams import stream
from peers.job import site_name
from watch import Usage, watch

PEERS = Path(__file__).parent / "peers"
PEER_NAMES = ("pfl", "flower", "nvflare", "fedlab")
JOB = {"sites": 10, "images": 200, "rounds": 5, "batch": 32, "lr": 0.02, "classes": 8, "pixels": 32, "seed": 1}
REDUCED = {"sites": 4, "rounds": 3}
QUICK = {"sites": 3, "images": 40, "rounds": 2}
#: ResNet-18 is some ten times as heavy as the job's net
RESNET_JOB = {"sites": 4, "images": 100}
RESNET = ("net.name=resnet18",)
#: what is changed, settings of both sides, rounds, settings of one side; workers take seconds to start
VARIANTS: tuple[tuple[str, tuple[str, ...], int, tuple[str, ...]], ...] = (
    ("two workers", (), 15, ("compute.workers=2",)),
    ("channels-last", (), 5, ("compute.channels_last=true",)),
    ("channels-last, ResNet-18", RESNET, 3, ("compute.channels_last=true",)),
)
#: whether several turns ended with the same weights, in words
REPEATS = {True: "yes", False: "no", None: "one turn"}
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Contender:
    """A script that runs the job, the interpreter it needs, and settings for it."""

    name: str
    script: str
    python: str = sys.executable
    packages: tuple[str, ...] = ("torch",)
    settings: tuple[str, ...] = ()
    once: bool = False


def write_job(folder: Path, job: dict[str, Any]) -> Path:
    """Draw the job's images, labels and orders. The orders are those that Equipoise draws itself for this seed."""
    folder.mkdir(parents=True)
    sites, images, pixels = job["sites"], job["images"], job["pixels"]
    rng = np.random.default_rng(job["seed"])
    looks = rng.normal(size=(job["classes"], 3, pixels, pixels))
    shares = rng.dirichlet([0.5] * job["classes"], sites)
    labels = np.concatenate([rng.choice(job["classes"], images, p=share) for share in shares])
    levels = 128 + 40 * (looks[labels] + rng.normal(size=(sites * images, 3, pixels, pixels)))
    orders = np.stack([[_order(job, number, site) for site in range(sites)] for number in range(1, job["rounds"] + 1)])
    np.save(folder / "images.npy", levels.clip(0, 255).astype(np.uint8))
    np.save(folder / "labels.npy", labels)
    np.save(folder / "orders.npy", orders)
    (folder / "job.json").write_text(json.dumps(job))
    return folder


def _order(job: dict[str, Any], round_number: int, site: int) -> np.ndarray:
    seed = stream(job["seed"], "order", round_number, site_name(site), 0)
    return torch.randperm(job["images"], generator=torch.Generator().manual_seed(seed)).numpy()


def versions_of(contender: Contender) -> dict[str, str] | None:
    """The installed versions of the packages a contender needs, or None where one is missing."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{p: m.version(p) for p in {contender.packages}}}))"
    try:
        found = subprocess.run([contender.python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return json.loads(found.stdout) if found.returncode == 0 else None


def present(contenders: Sequence[Contender]) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that can run here, and the versions of what they need; says which cannot."""
    able, versions = [], {"python": platform.python_version()}
    for contender in contenders:
        found = versions_of(contender)
        if found is None:
            option = contender.script.removesuffix("_run")
            needed = ", ".join(contender.packages)
            print(f"{contender.name} is left out: {contender.python} lacks one of {needed}; see --python-{option}")
            continue
        able.append(contender)
        versions |= found
    return able, versions


def run_once(contender: Contender, job: Path, out: Path) -> dict[str, Any]:
    """One run in a fresh process: what it cost, and a digest of the final weights."""
    out.mkdir(parents=True)
    command = [contender.python, str(PEERS / f"{contender.script}.py"), str(job), str(out), *contender.settings]
    usage: Usage = watch(command, out / "log.txt", {**os.environ, **QUIET})
    if usage.code:
        raise SystemExit(f"{contender.name} ended with code {usage.code}:\n{(out / 'log.txt').read_text()[-2000:]}")
    weights = torch.load(out / "weights.pt")
    digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()
    facts = json.loads((out / "facts.json").read_text())
    return {
        "wall_s": usage.wall_s,
        "cpu_s": usage.cpu_s,
        "memory_gb": usage.memory_gb,
        "anonymous_gb": usage.anonymous_gb,
        "weights": digest[:16],
        **facts,
    }


def measure(contenders: Sequence[Contender], job: Path, folder: Path, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """All contenders in turns, `repeats` times, by name."""
    runs: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        for contender in contenders:
            if contender.once and repeat:
                continue
            run = run_once(contender, job, folder / f"{contender.name}-{repeat}")
            runs[contender.name].append(run)
            print(
                f"  {contender.name:<24} wall {run['wall_s']:6.2f} s   CPU {run['cpu_s']:6.2f} s   "
                f"{run['memory_gb']:.2f} GB   load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    return runs


def distance(folder: Path, one: str, other: str) -> float:
    """|a - b| / |b| over all final weights of two contenders' first runs."""
    a, b = (torch.load(folder / f"{name}-0" / "weights.pt") for name in (one, other))
    joined = [torch.cat([weights[name].double().flatten() for name in b]) for weights in (a, b)]
    return float((joined[0] - joined[1]).norm() / joined[1].norm())


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs of one contender, and whether all ended with the same weights."""
    numbers = [key for key, value in runs[0].items() if isinstance(value, float)]
    medians = {key: round(statistics.median(run[key] for run in runs), 4) for key in numbers}
    identical = len({run["weights"] for run in runs}) == 1 if len(runs) > 1 else None
    return {**medians, "identical": identical}


def ratio(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], key: str) -> float:
    """Median over repeats of one contender's figure by the base's of the same turn."""
    return round(statistics.median(run[key] / other[key] for run, other in zip(runs, base)), 4)


def engines(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The job on every engine, and the table of ratios to the plain loop."""
    contenders, versions = present(
        [
            Contender("plain-loop", "plain_loop"),
            Contender("equipoise", "equipoise_run", packages=("torch", "equipoise")),
            Contender("pfl", "pfl_run", arguments.python_pfl, ("torch", "pfl")),
            Contender("fedlab", "fedlab_run", arguments.python_fedlab, ("torch", "fedlab")),
            Contender("flower-simulation", "flower_run", arguments.python_flower, ("torch", "flwr", "ray")),
            Contender("nvflare", "nvflare_run", arguments.python_nvflare, ("torch", "nvflare"), once=True),
        ]
    )
    job = JOB | (QUICK if arguments.quick else REDUCED if arguments.reduced else {})
    runs = measure(contenders, write_job(folder / "job", job), folder, arguments.repeats)
    base, rows = runs["plain-loop"], []
    for name, found in runs.items():
        ratios = {key: ratio(found, base, key) for key in ("wall_s", "cpu_s", "memory_gb", "job_wall_s", "job_cpu_s")}
        rows.append({"name": name, **summary(found), "ratios": ratios, "runs": found})
        rows[-1]["distance_to_plain_loop"] = distance(folder, name, "plain-loop")
        if name in ("flower-simulation", "nvflare"):  # the CPU time of their sites is not of the first process
            del rows[-1]["job_cpu_s"], ratios["job_cpu_s"]
    print(f"\n{'to the plain loop':<20}{'wall':>7}{'CPU':>7}{'memory':>8}{'job wall':>10}{'job CPU':>9}  identical")
    for row in rows:
        r = row["ratios"]
        own = f"{r['job_cpu_s']:9.3f}" if "job_cpu_s" in r else f"{'-':>9}"
        figures = f"{r['wall_s']:7.2f}{r['cpu_s']:7.2f}{r['memory_gb']:8.2f}{r['job_wall_s']:10.3f}{own}"
        print(f"{row['name']:<20}{figures}  {REPEATS[row['identical']]}")
    return {"engines": rows, "job": job, "versions": versions}


def variants(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Equipoise alone: two workers against one, channels-last against the usual, as ratios."""
    found = []
    for name, against, rounds, settings in VARIANTS[1:2] if arguments.quick else VARIANTS:
        job = JOB | (RESNET_JOB if against == RESNET else {}) | {"rounds": rounds}
        job |= QUICK if arguments.quick else {}
        usual = Contender("usual", "equipoise_run", settings=against)
        other = replace(usual, name=name, settings=(*against, *settings))
        runs = measure([usual, other], write_job(folder / name / "job", job), folder / name, arguments.repeats)
        ratios = {key: ratio(runs[name], runs["usual"], key) for key in ("wall_s", "cpu_s", "job_wall_s")}
        same = len({run["weights"] for both in runs.values() for run in both}) == 1
        row = {"name": name, "ratios": ratios, "same_weights": same, "rounds": rounds}
        found.append(row | {key: summary(both) for key, both in zip(("usual", "changed"), runs.values())})
        print(
            f"{name}: wall x {ratios['wall_s']:.2f}, without start x {ratios['job_wall_s']:.2f}, same weights: {same}"
        )
    return {"variants": found}


def main() -> None:
    """Measure, print and write `cpu.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in PEER_NAMES:
        parser.add_argument(f"--python-{peer}", default=sys.executable, help=f"an interpreter that has {peer}")
    parser.add_argument("--repeats", type=int, default=3, help="turns; at least 2, to see whether results repeat")
    parser.add_argument("--reduced", action="store_true", help="one turn of 4 sites and 3 rounds, engines alone")
    parser.add_argument("--quick", action="store_true", help="a tiny job, to try the script")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    arguments = parser.parse_args()
    arguments.repeats = 1 if arguments.quick or arguments.reduced else arguments.repeats
    with tempfile.TemporaryDirectory() as folder:
        result = engines(arguments, Path(folder) / "engines")
        result |= {} if arguments.reduced else variants(arguments, Path(folder) / "variants")
    result["command"] = "python benchmarks/cpu.py" + "".join(f" --python-{peer} PATH" for peer in PEER_NAMES)
    result["command"] += (
        f" --repeats {arguments.repeats}" + " --quick" * arguments.quick + " --reduced" * arguments.reduced
    )
    result["machine"] = {"cores": os.cpu_count(), "load_at_end": round(os.getloadavg()[0], 2)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "cpu-reduced.json" if arguments.reduced else "cpu.json"
    (arguments.out / name).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
