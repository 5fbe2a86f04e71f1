"""What the GPU does while FedBM's server trains its generator, at the paper's setting for HAM10000, by kind of kernel.

    python benchmarks/profile_generator.py [--out results/benchmarks]

One training of 100 steps, replayed, against a net of the first weights. Writes `generator.json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from equipoise.contract.method import Setting
from equipoise.engine.local_engine import LocalEngine
from equipoise.engine.runs import make_config
from equipoise.methods import get_method
from gpu import synchronise
from profile_epochs import summarise
from systems import CUDA, SYSTEMS

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "a GPU"

LISTED = 60


def profile() -> dict[str, Any]:
    """A training of the generator after one that captures; its seconds are of one more, without the profiler."""
    federated = SYSTEMS["fedbm-ham10000"].federated
    config = make_config(federated.preset, ["net.weights='none'", *CUDA])
    method = get_method(config.method)
    federation, random = federated.federation(), torch.Generator("cuda")
    setting = Setting.of(config, method, federation, "cuda")
    with tempfile.TemporaryDirectory() as folder, LocalEngine(method, setting, federation, Path(folder)):
        server: Any = method.server(setting)
        train = server.generator_training.run
        train(random)
        synchronise()
        began = time.perf_counter()
        train(random)
        synchronise()
        seconds = time.perf_counter() - began
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            train(random)
            synchronise()
    found = summarise(seconds, seen, LISTED)
    return {"training_s": found.pop("round_s"), **found}


def main() -> None:
    """Profile and write `generator.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    arguments = parser.parse_args()
    found = profile()
    print(json.dumps(found, indent=1))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "generator.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
