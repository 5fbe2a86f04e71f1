"""Captured against eager steps on the GPU, method by method: the same results from the same seed in fp32.

    python benchmarks/equivalence.py [--methods a,b] [--out results/benchmarks]

For each method: the cohort (8 slots, captured) against one slot run eagerly, and against one captured slot, after
one and after 20 steps; beside it, two eager runs that differ in summation order (channels-last).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from equipoise.data import load_federation
from equipoise.engine.loop import Run
from equipoise.engine.protocol import flatten
from equipoise.methods import get_method, method_names
from equipoise.runs import make_config

BASE = (
    "train.rounds=2",
    "train.batch_size=8",
    "data.phantom.images=420",
    "data.phantom.sites=4",
    "data.phantom.size=32",
    "augment.name='flips'",
    "evaluation.trained=false",
    "train.optimiser.lr=0.01",
    "compute.device='cuda'",
)

OTHER_ORDER = "compute.channels_last=true"
EAGER = ("compute.slots=1", "compute.capture=false")


def final_state(method: str, *settings: str) -> dict[str, torch.Tensor]:
    """Every server and site tensor after a short run."""
    config = make_config(None, [*BASE, *settings], method=method)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, get_method(method), load_federation(config.data, 1), Path(folder), device="cuda")
        run.execute()
        state = flatten(run.server.state.snapshot())[0]
        for site in run.sites:
            for name, tensor in (run.engine.states.load(site) or {}).items():
                state[f"{site}/{name}"] = tensor
    return {name: t.detach().cpu().double() for name, t in state.items() if t.is_floating_point()}


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Relative distance of two states."""
    gap = sum(float((first[name] - second[name]).square().sum()) for name in first)
    size = sum(float(first[name].square().sum()) for name in first)
    return (gap / max(size, 1e-30)) ** 0.5


def main() -> None:
    """Compare every method and write `equivalence.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", default="")
    parser.add_argument("--net", default="small-cnn")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    arguments = parser.parse_args()
    rows = []
    for method in arguments.methods.split(",") if arguments.methods else method_names():
        net = f"net.name='{arguments.net}'"
        for steps in (1, 20):
            work = (net, f"train.steps={steps}", *(("train.rounds=1",) if steps == 1 else ()))
            try:
                eager = final_state(method, *work, *EAGER)
                row = {
                    "method": method,
                    "steps": steps,
                    "captured_8_slots": distance(eager, final_state(method, *work, "compute.slots=8")),
                    "captured_1_slot": distance(eager, final_state(method, *work, "compute.slots=1")),
                    "eager_other_order": distance(eager, final_state(method, *work, *EAGER, OTHER_ORDER)),
                }
            except Exception as problem:
                row = {"method": method, "steps": steps, "error": f"{type(problem).__name__}: {problem}"[:300]}
            rows.append(row)
            print(row, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "equivalence.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
