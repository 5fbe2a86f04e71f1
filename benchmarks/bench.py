"""All that this machine can measure, and one table of it: `make bench`.

    python benchmarks/bench.py [--only overhead,cpu] [--quick] [--out results/benchmarks]

Runs the scripts for a CPU one after another. Each peer of `cpu.py` gets an environment in `.bench/`, made once with the
torch of this one. The table names peers that do not install, with pip's reason. The script makes `table.md` from the
files that the other scripts write.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "the network, for the peers' packages; its scripts are tried one by one"
HERE = Path(__file__).parent
PLACE = HERE.parent / ".bench"
SCRIPTS = ("overhead", "pfa", "start", "growth", "cpu", "flower", "spread")
#: what is installed for a peer, by the option of `cpu.py` that names its interpreter
PEERS = {
    "--python-pfl": "pfl",
    "--python-flower": "flwr[simulation]",
    "--python-nvflare": "nvflare",
    "--python-fedlab": "fedlab",
}
Row = tuple[str, str, str]


def peers() -> tuple[list[str], dict[str, str]]:
    """Options of `cpu.py` that name the peers' interpreters, and why other peers did not install."""
    found, absent = [], {}
    for option, package in PEERS.items():
        folder = PLACE / option.removeprefix("--python-")
        python = folder / "bin" / "python"
        if not python.exists():
            venv.create(folder, with_pip=True)
        same_torch = f"torch=={torch.__version__.partition('+')[0]}"
        command = [str(python), "-m", "pip", "install", "--quiet", same_torch, package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            absent[folder.name] = errors[-1] if errors else f"pip ended with {done.returncode}"
        else:
            found += [option, str(python)]
    return found, absent


def of_overhead(told: Any) -> Iterator[Row]:
    yield "engine / plain loop, ResNet-18 at 32 px", "CPU seconds", f"{told['ratio']:.2f}"


def of_cpu(told: Any) -> Iterator[Row]:
    for row in told["engines"]:
        for key, unit in (("cpu_s", "CPU seconds"), ("memory_gb", "memory")):
            yield f"{row['name']} / plain loop, a CNN at 10 sites", unit, f"{row['ratios'][key]:.2f}"


def of_flower(told: Any) -> Iterator[Row]:
    minimal = {row["sites"]: row for row in told["results"] if row["side"] == "minimal"}
    for row in told["results"]:
        if row["side"] == "after":
            for key, unit in (("seconds_per_round", "seconds"), ("cpu_s_per_round", "CPU seconds")):
                ratio = row[key] / minimal[row["sites"]][key]
                yield f"a round on Flower / of a minimal Flower app, {row['sites']} sites", unit, f"{ratio:.2f}"


def of_spread(told: Any) -> Iterator[Row]:
    yield f"a run on {told['devices']} devices / on one", "CPU seconds", f"{told['cpu_ratio']:.2f}"
    for devices, share in told["model"].items():
        yield f"{told['sites']} sites on {devices} devices: share of linear scaling", "model", f"{share:.0%}"


def of_pfa(told: Any) -> Iterator[Row]:
    for row in told["rows"]:
        yield (
            f"Fourier aggregation, phase {row['phase']}, {row.get('side', 'as timed')}",
            "CPU seconds",
            f"{row['s']:.2f}",
        )


def of_start(told: Any) -> Iterator[Row]:
    after = told["after"]
    yield "from the command to the end of the first training step", "seconds", f"{after['first_step_s']:.2f}"
    yield "evaluation beside its forward passes, of a default run", "share", f"{after['evaluation_share']:.1%}"


def of_growth(told: Any) -> Iterator[Row]:
    for curve in told["curves"].values():
        for row in curve["rows"]:
            grows = "–" if row["exponent"] is None else f"{row['exponent']:.2f}"
            yield f"{curve['of']}: {row['quantity']}", "exponent", grows


ROWS: dict[str, Callable[[Any], Iterator[Row]]] = {
    "overhead": of_overhead,
    "cpu": of_cpu,
    "pfa": of_pfa,
    "start": of_start,
    "growth": of_growth,
    "flower": of_flower,
    "spread": of_spread,
}


def table(out: Path, absent: dict[str, str]) -> str:
    """The table of all files that are there."""
    lines = ["| what is compared with what | in | value |", "| --- | --- | ---: |"]
    for name in SCRIPTS:
        if (out / f"{name}.json").exists():
            lines += [f"| {' | '.join(row)} |" for row in ROWS[name](json.loads((out / f"{name}.json").read_text()))]
    lines += [f"\nLeft out, for it did not install: {name} ({why})." for name, why in absent.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the scripts, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCRIPTS), help="these scripts; empty: only the table")
    parser.add_argument("--quick", action="store_true", help="the scripts' quick forms")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "benchmarks")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in options.only.split(",") if name]
    named, absent = peers() if "cpu" in chosen else ([], {})
    for name in chosen:
        command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(options.out)]
        command += ["--quick"] * options.quick + (named if name == "cpu" else [])
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"{name}.py failed")
    (options.out / "table.md").write_text(table(options.out, absent), encoding="utf-8")
    print(options.out / "table.md")


if __name__ == "__main__":
    main()
