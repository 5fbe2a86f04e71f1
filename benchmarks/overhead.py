"""What the engine costs on a CPU: the same FedAvg job through the engine and as a plain loop, as ratios in one run.

    python benchmarks/overhead.py [--out results/benchmarks]

Both sides train the same net on the same augmented batches with one thread, in turns; the ratio is of CPU seconds.
Memory: peak of a process that runs one round of 10, 100 and 1,000 sites of the same size.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from equipoise.config import Config
from equipoise.data import load_federation
from equipoise.data.augment import build_augmentation
from equipoise.engine.contract import Setting
from equipoise.engine.loop import Run
from equipoise.engine.training import cut
from equipoise.methods import get_method
from equipoise.runs import make_config
from equipoise.streams import stream

REPEATS = 5


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

        def timed(number: int):
            nonlocal spent
            began = time.process_time()
            yield from steps(number)
            run._checkpoint(number, 0.0)
            spent += time.process_time() - began

        run._round = timed  # type: ignore[method-assign]
        run.execute()
    return spent


def peak_memory(sites: int) -> float:
    """GB of a fresh process that trains one round of so many sites with 8 images each."""
    script = (
        "import sys, torch; sys.path.insert(0, {here!r}); import overhead, resource; torch.set_num_threads(1); "
        "c = overhead.config_of({sites}, {images}, 'train.rounds=1', 'train.epochs=1', 'data.phantom.imbalance=2'); "
        "overhead.engine(c); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", script.format(here=here, sites=sites, images=12 * sites)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    """Measure, print and write `overhead.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--sites", default="10,100,1000", help="numbers of sites for the memory figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = config_of(4, 400)
    ratios, pairs = [], []
    for _ in range(REPEATS):
        plain, ours = plain_loop(config)[0], engine(config)
        pairs.append((plain, ours))
        ratios.append(ours / plain)
        print(f"plain loop {plain:6.2f} CPU s   engine {ours:6.2f} CPU s   ratio {ours / plain:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}")
    memory = {}
    for sites in map(int, arguments.sites.split(",")):
        memory[sites] = peak_memory(sites)
        print(f"{sites:>5} sites: peak {memory[sites]:.2f} GB", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {"ratio": statistics.median(ratios), "pairs_cpu_s": pairs, "peak_memory_gb": memory}
    result["memory_of_benchmark_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    (arguments.out / "overhead.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
