"""What the engine costs on a CPU: the same FedAvg job through the engine and as a plain loop, as ratios in one run.

    python benchmarks/overhead.py [--quick] [--out results/benchmarks]

Both sides train the same net on the same augmented batches with one thread, in turns; the ratio is of CPU seconds.
Memory: peak of a fresh process that runs one round of 10, 100 and 1,000 sites with one step each, seen from outside.
With ResNet-18 a round draws at most 100 of them: replies beyond a fixed budget lie in files, 45 MB each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from equipoise.contract.config import Config
from equipoise.contract.method import Setting
from equipoise.core.streams import stream
from equipoise.data import load_federation
from equipoise.data.augment import build_augmentation
from equipoise.engine.loop import Run
from equipoise.engine.runs import make_config
from equipoise.engine.training import cut
from equipoise.methods import get_method
from peers.job import warm_up
from watch import watch

REPEATS = 5
#: sites that train in one round at most, by net
MOST_IN_ROUND = {"small-cnn": 1000, "resnet18": 100}


def config_of(sites: int, images: int, *more: str) -> Config:
    """FedAvg on the phantom, evaluation off as far as it goes."""
    return make_config(
        None,
        [
            f"data.phantom.sites={sites}",
            f"data.phantom.images={images}",
            "data.phantom.missing=0",
            "data.phantom.skew=0",
            "train.rounds=2",
            "train.epochs=2",
            "train.batch_size=32",
            "augment.name='flips'",
            "net.name='resnet18'",
            "evaluation.trained=false",
            "evaluation.every=100",
            *more,
        ],
    )


def plain_loop(config: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """The job written as one would without a framework: CPU seconds of its rounds, and the final weights."""
    federation = load_federation(config.data, config.seed)
    setting = Setting.of(config, get_method("fedavg"), federation)
    augmentation = build_augmentation(config.augment, federation.image_size, federation.channels)
    net = setting.new_net().train()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    settings = config.train.optimiser
    began = time.process_time()
    for number in range(1, config.train.rounds + 1):
        total, sums = 0, {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in state.items()}
        for site in federation.training_sites():
            net.load_state_dict(state)
            optimiser = torch.optim.SGD(net.parameters(), settings.lr, settings.momentum)
            part = site.splits["train"]
            labels = torch.from_numpy(part.labels)
            for epoch in range(config.train.epochs):
                seeds = [stream(config.seed, purpose, number, site.name, epoch) for purpose in ("order", "augment")]
                order = torch.randperm(len(part), generator=torch.Generator().manual_seed(seeds[0]))
                randomness = torch.Generator().manual_seed(seeds[1])
                for rows in cut(order, config.train.batch_size):
                    images = augmentation.view(0)(part.images(rows), randomness)
                    optimiser.zero_grad()
                    F.cross_entropy(net(images), labels[rows]).backward()
                    optimiser.step()
            total += len(part)
            for name, tensor in net.state_dict().items():
                sums[name] += tensor.double() * len(part)
        state = {name: (tensor / total).to(state[name].dtype) for name, tensor in sums.items()}
    return time.process_time() - began, state


def engine(config: Config) -> float:
    """CPU seconds of the same rounds through the engine, checkpoints included."""
    federation = load_federation(config.data, config.seed)
    spent = 0.0
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, get_method("fedavg"), federation, Path(folder))
        steps = run._round

        def timed(number: int) -> Iterator[None]:
            nonlocal spent
            began = time.process_time()
            yield from steps(number)
            if number:
                run._checkpoint(number, 0.0)
                spent += time.process_time() - began

        run._round = timed  # type: ignore[method-assign, assignment]
        run.execute()
    return spent


def scaling(sites: int, net: str, most: int) -> dict[str, Any]:
    """What a fresh process takes for one round of `sites`, of which at most `most` train, each on some 8 images."""
    share = min(most / sites, 1.0)
    # Few training images leave a class out here and there; one common test set keeps evaluation the same for all.
    settings = ["train.rounds=1", "train.epochs=1", "data.phantom.imbalance=2", "data.phantom.common=true"]
    settings += ["data.phantom.size=16", "augment.name='none'", f"net.name='{net}'", f"train.participation={share}"]
    script = (
        f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r}); import overhead; "
        f"torch.set_num_threads(1); overhead.engine(overhead.config_of({sites}, {12 * sites}, *{settings}))"
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        usage = watch([sys.executable, "-c", script], log, os.environ)
        if usage.code:
            raise SystemExit(log.read_text())
    return {
        "net": net,
        "sites": sites,
        "sites_in_round": int(share * sites),
        "wall_s": round(usage.wall_s, 2),
        "cpu_s": round(usage.cpu_s, 2),
        "memory_gb": round(usage.memory_gb, 3),
    }


def main() -> None:
    """Measure, print and write `overhead.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--sites", default="10,100,1000", help="numbers of sites to scale over")
    parser.add_argument("--quick", action="store_true", help="one turn of a small net, to try the script")
    arguments = parser.parse_args()
    quick = ["net.name='small-cnn'", "train.epochs=1"] if arguments.quick else []
    torch.set_num_threads(1)
    warm_up()
    config = config_of(4, 400, *quick)
    ratios, pairs = [], []
    for _ in range(1 if quick else REPEATS):
        plain, ours = plain_loop(config)[0], engine(config)
        pairs.append((plain, ours))
        ratios.append(ours / plain)
        print(f"plain loop {plain:6.2f} CPU s   engine {ours:6.2f} CPU s   ratio {ours / plain:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}")
    rows = []
    for net, most in [*MOST_IN_ROUND.items()][: 1 if quick else None]:
        for sites in [10] if quick else map(int, arguments.sites.split(",")):
            rows.append(scaling(sites, net, most))
            print(
                f"{net}, {sites:>5} sites, {rows[-1]['sites_in_round']:>4} in the round: "
                f"peak {rows[-1]['memory_gb']:.2f} GB, {rows[-1]['cpu_s']:.0f} CPU s",
                flush=True,
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {"ratio": statistics.median(ratios), "pairs_cpu_s": pairs, "scaling": rows}
    (arguments.out / "overhead.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
