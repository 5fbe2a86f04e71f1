"""How fast sites train on one GPU: the engine's cohort beside the usual eager loop, in one run, as ratios.

    python benchmarks/gpu.py [--quick] [--out results/benchmarks]

Engine figures are of whole rounds: reading, augmentation, captured steps, averaging; no evaluation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from equipoise.data import load_federation
from equipoise.engine.contract import Setting
from equipoise.engine.local import LocalEngine
from equipoise.engine.protocol import Ask
from equipoise.methods import get_method
from equipoise.runs import make_config

SETTINGS = {
    "resnet18-28-b8-n10": ("resnet18", 28, 8, 10, "tf32", 16_868),
    "resnet18-128-b8-n10": ("resnet18", 128, 8, 10, "bf16", 12_161),
    "effb0-64-b32-n10": ("efficientnet-b0", 64, 32, 10, "tf32", 14_868),
    "effb0-128-b32-n10": ("efficientnet-b0", 128, 32, 10, "bf16", 11_506),
    "effb0-224-b32-n6": ("efficientnet-b0", 224, 32, 6, "bf16", 5_009),
}


def config_of(net: str, size: int, batch: int, sites: int, precision: str, steps: int) -> Any:
    """FedAvg with Adam on a phantom whose sites have equal numbers of images."""
    return make_config(
        None,
        [
            f"net.name='{net}'",
            f"train.batch_size={batch}",
            f"train.steps={steps}",
            "train.optimiser.name='adam'",
            "train.optimiser.lr=0.0001",
            f"data.phantom.size={max(size, 16)}",
            f"data.phantom.sites={sites}",
            f"data.phantom.images={sites * batch * 12}",
            "data.phantom.classes=8",
            "data.phantom.skew=0",
            "data.phantom.missing=0",
            f"compute.precision='{precision}'",
            "compute.deterministic=false",
            f"compute.channels_last={'true' if precision == 'bf16' else 'false'}",
            "augment.name='flips'",
            "evaluation.trained=false",
        ],
    )


def usual_loop(config: Any, federation: Any, steps: int) -> float:
    """Images per second of eager PyTorch, one site after the other, fp32/tf32, images ready on the device."""
    setting = Setting.of(config.model_copy(update={"compute": config.compute.model_copy(update={"channels_last": False})}), get_method("fedavg"), federation, "cuda")
    batch, size = config.train.batch_size, federation.image_size
    nets = [setting.new_net().train() for _ in federation.training_sites()]
    optimisers = [torch.optim.Adam(net.parameters(), lr=1e-4, foreach=True) for net in nets]
    images = torch.randn(batch, 3, size, size, device="cuda")
    labels = torch.randint(0, 8, (batch,), device="cuda")

    def go(count: int) -> None:
        for _ in range(count):
            for net, optimiser in zip(nets, optimisers):
                optimiser.zero_grad()
                F.cross_entropy(net(images), labels).backward()
                optimiser.step()

    go(2)
    torch.cuda.synchronize()
    began = time.perf_counter()
    go(steps)
    torch.cuda.synchronize()
    return len(nets) * batch * steps / (time.perf_counter() - began)


def engine_speed(config: Any, federation: Any, rounds: int, slots: int = 0) -> dict[str, float]:
    """Images per second of whole rounds through the engine, after a first round that captures."""
    method = get_method("fedavg")
    config = config.model_copy(update={"compute": config.compute.model_copy(update={"slots": slots or len(federation.sites)})})
    setting = Setting.of(config, method, federation, "cuda")
    sites = [site.name for site in federation.training_sites()]
    with tempfile.TemporaryDirectory() as folder, LocalEngine(method, setting, federation, Path(folder)) as engine:
        server = method.server(setting)

        def one_round(number: int) -> None:
            engine.begin(number, 0)
            conversation = server.round(number, sites)
            ask: Ask = next(conversation)
            work = engine.ask(ask)
            try:
                while True:
                    next(work)
            except StopIteration as stop:
                replies = stop.value
            try:
                conversation.send(replies)
            except StopIteration:
                pass
            engine.commit()

        began = time.perf_counter()
        one_round(1)
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        began = time.perf_counter()
        for number in range(2, rounds + 2):
            one_round(number)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        images = rounds * len(sites) * config.train.steps * config.train.batch_size
        captures = sum(slot.run_step.seconds for slot in engine._place.slots)
        return {
            "img_s": images / seconds,
            "first_round_s": first,
            "capture_s": captures,
            "memory_gb": torch.cuda.max_memory_reserved() / 2**30,
        }


def main() -> None:
    """Measure every setting and write `gpu.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    arguments = parser.parse_args()
    rows = []
    for name, (net, size, batch, sites, precision, reference) in SETTINGS.items():
        if arguments.only and arguments.only not in name:
            continue
        steps = 20 if arguments.quick else 60
        config = config_of(net, size, batch, sites, precision, steps)
        federation = load_federation(config.data, 1)
        torch.cuda.reset_peak_memory_stats()
        eager = usual_loop(config, federation, 5)
        engine = engine_speed(config, federation, 3)
        torch.cuda.empty_cache()
        row = {"name": name, "eager_img_s": eager, "engine_img_s": engine["img_s"], "ratio": engine["img_s"] / eager}
        row |= {"of_reference": engine["img_s"] / reference, **engine}
        rows.append(row)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu.json").write_text(json.dumps({"settings": rows}, indent=1))


if __name__ == "__main__":
    main()
