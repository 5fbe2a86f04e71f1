"""Captured against eager steps on the GPU, method by method: the same results from the same seed in fp32.

    python benchmarks/equivalence.py [--methods a,b] [--net NAME] [--quick] [--out results/benchmarks]

For each method, after one step and after two rounds of 20: the GPU (8 slots, captured; graphs captured at one site
and replayed at others) against one slot run eagerly, one captured slot against it, and, for scale, an eager run with
another summation order (channels-last). Relative distances over all server and site tensors. The last row is FedAvg
with images paged in from the host against images that stay on the device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from equipoise.contract.method import Server
from equipoise.contract.protocol import flatten
from equipoise.contract.repeat import Repeated
from equipoise.data import load_federation
from equipoise.engine import training
from equipoise.engine.loop import Run
from equipoise.engine.runs import make_config
from equipoise.methods import get_method, method_names

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "a GPU"

BASE = (
    "train.batch_size=8",
    "data.phantom.images=420",
    "data.phantom.sites=4",
    "data.phantom.size=32",
    "augment.name='flips'",
    "evaluation.trained=false",
    "evaluation.every=100",
    "train.optimiser.lr=0.01",
    "compute.device='cuda'",
)
EAGER = ("compute.slots=1", "compute.capture=false")
OTHER_ORDER = "compute.channels_last=true"
#: methods that count epochs, not steps, and how many take them through all they do
EPOCHS = {"prr": 3, "fedrep": 1}


def final_state(method: str, *settings: str) -> tuple[dict[str, torch.Tensor], int]:
    """Every server and site tensor after a short run, and the number of captured graphs (0 after a fallback)."""
    options = get_method(method).options
    config = make_config(None, [*BASE, *options.in_short, *options.at_little_cost, *settings], method=method)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, get_method(method), load_federation(config.data, 1), Path(folder), device="cuda")
        graphs = 0
        for _ in run.steps():
            steps = [slot.run_step for slot in run.engine.place.slots]  # type: ignore[attr-defined]
            graphs = max(graphs, sum(len(s._graphs) for s in steps) if all(s.enabled for s in steps) else 0)
        if config.compute.capture:
            assert all(repeated.captured for repeated in what_it_repeats(run.server)), (
                "the server fell back to eager steps"
            )
        state = flatten(run.server.state.snapshot())[0]
        for site in run.sites:
            for name, tensor in (run.engine.states.load(site) or {}).items():  # type: ignore[attr-defined]
                state[f"{site}/{name}"] = tensor
    return {name: t.detach().cpu().double() for name, t in state.items() if t.is_floating_point()}, graphs


def what_it_repeats(server: Server) -> list[Repeated]:
    """What a server and its components repeat, themselves or in a part of them."""
    holders = [server, *getattr(server, "sides", {}).values()]
    values = [value for holder in holders for value in vars(holder).values()]
    parts = [value for value in values if type(value).__module__.startswith("equipoise.components")]
    values += [value for part in parts for value in vars(part).values()]
    return [value for value in values if isinstance(value, Repeated)]


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Relative distance of two states."""
    gap = sum(float((first[name] - second[name]).square().sum()) for name in first)
    size = sum(float(first[name].square().sum()) for name in first)
    return (gap / max(size, 1e-30)) ** 0.5


def compare(method: str, net: str, steps: int, quick: bool) -> dict[str, Any]:
    """One row of the table."""
    amount = f"train.epochs={EPOCHS[method]}" if method in EPOCHS else f"train.steps={steps}"
    work = (f"net.name='{net}'", amount, f"train.rounds={1 if steps == 1 else 2}")
    eager, _ = final_state(method, *work, *EAGER)
    captured, graphs = final_state(method, *work, "compute.slots=8")
    row = {"method": method, "net": net, "steps": steps, "graphs": graphs}
    row["captured_8_slots"] = distance(eager, captured)
    if not quick:
        row["captured_1_slot"] = distance(eager, final_state(method, *work, "compute.slots=1")[0])
        row["eager_other_order"] = distance(eager, final_state(method, *work, *EAGER, OTHER_ORDER)[0])
    return row


def paging(net: str) -> dict[str, Any]:
    """FedAvg with images that do not fit on the device against images that do."""
    work = (f"net.name='{net}'", "train.steps=20", "train.rounds=2", "compute.slots=8")
    resident, _ = final_state("fedavg", *work)
    share, training.RESIDENT_SHARE = training.RESIDENT_SHARE, 0.0
    try:
        paged, _ = final_state("fedavg", *work)
    finally:
        training.RESIDENT_SHARE = share
    return {"method": "fedavg", "net": net, "steps": 20, "paged": distance(resident, paged)}


def main() -> None:
    """Compare every method and write `equivalence.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="")
    parser.add_argument("--net", default="small-cnn")
    parser.add_argument("--quick", action="store_true", help="only 20 steps, only the GPU against eager")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for method in arguments.methods.split(",") if arguments.methods else method_names():
        for steps in (20,) if arguments.quick else (1, 20):
            try:
                row = compare(method, arguments.net, steps, arguments.quick)
            except Exception as problem:
                row = {"method": method, "steps": steps, "error": f"{type(problem).__name__}: {problem}"[:300]}
            rows.append(row)
            print(row, flush=True)
            (arguments.out / "equivalence.json").write_text(json.dumps(rows, indent=1))
    if not arguments.methods:
        rows.append(paging(arguments.net))
        print(rows[-1], flush=True)
        (arguments.out / "equivalence.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
