"""What the GPU does in a round of the dermoscopic federation: milliseconds of kernels, by kind, on images of noise.

    python benchmarks/profile_epochs.py [--methods fedavg,prr] [--out results/benchmarks]

Two local epochs, in bfloat16 and channels-last, once captured. Kernels of several streams run at the same time,
so their sum exceeds the seconds of the round. Writes `profile.json` with the longest kernels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from equipoise.contract.method import Setting
from equipoise.engine.local_engine import LocalEngine
from equipoise.engine.runs import make_config
from equipoise.methods import get_method
from gpu import DERMOSCOPY
from systems import converse, time_round

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "a GPU"

#: words in the names of kernels, first match counts
KINDS = {
    "batch norm": (
        *("batch_norm", "batchnorm", "value_sums", "gradient_sums", "statistics", "gradient_totals", "moments"),
        *("each_normal", "each_gradient", "few_forward", "few_backward"),
        *("still_gradient", "choose_normal", "hand_back_normal"),
    ),
    "convolutions": ("xmma", "cutlass", "convolve", "wgrad", "dgrad"),
    "matrix products": ("gemm", "nvjet", "cublas"),
    "max pooling": ("max_pool", "_choose", "_hand_back"),
    "upsampling": ("upsample", "_spread", "_add_up"),
    "distances": ("cdist",),
    "casts and copies": ("direct_copy", "bfloat16_copy"),
    "element-wise": ("elementwise", "multi_tensor"),
}
LISTED = 28


def kind_of(kernel: str) -> str:
    """What a kernel is for, by its name."""
    return next((kind for kind, words in KINDS.items() if any(word in kernel for word in words)), "other")


def summarise(seconds: float, seen: torch.profiler.profile, listed: int = LISTED) -> dict[str, Any]:
    """Milliseconds of kernels that were seen, shares of them by kind, and the longest kernels."""
    found = sorted(((e.self_device_time_total / 1e3, e.count, e.key) for e in seen.key_averages()), reverse=True)
    total, kernels = sum(milliseconds for milliseconds, _, _ in found), found[:listed]
    shares: dict[str, float] = {}
    for milliseconds, _, name in kernels:
        shares[kind_of(name)] = shares.get(kind_of(name), 0.0) + milliseconds / total
    shares["not listed"] = 1 - sum(shares.values())
    return {
        "round_s": seconds,
        "kernels_ms": total,
        "shares": shares,
        "kernels": [{"ms": ms, "launches": launches, "name": name[:100]} for ms, launches, name in kernels],
    }


def profile(method: str) -> dict[str, Any]:
    """A round of two epochs, after two that capture and warm up; its seconds are of one more, without the profiler."""
    federation = DERMOSCOPY.federation()
    settings = [
        "compute.precision='bf16'",
        "compute.channels_last=true",
        f"compute.slots={len(federation.sites)}",
        "train.epochs=2",
        "evaluation.trained=false",
    ]
    config = make_config(DERMOSCOPY.preset, settings, method=method)
    chosen = get_method(method)
    setting = Setting.of(config, chosen, federation, "cuda")
    sites = [site.name for site in federation.sites]
    with tempfile.TemporaryDirectory() as folder, LocalEngine(chosen, setting, federation, Path(folder)) as engine:
        server = chosen.server(setting)
        converse(engine, server.start(sites))
        for number in (1, 2):
            time_round(engine, server, number, sites)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            time_round(engine, server, 3, sites)
        seconds = time_round(engine, server, 4, sites).whole
    return summarise(seconds, seen)


def main() -> None:
    """Profile and write `profile.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="fedavg,prr")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = {}
    for method in arguments.methods.split(","):
        rows[method] = profile(method)
        shares = "  ".join(f"{kind} {share:.1%}" for kind, share in rows[method]["shares"].items())
        print(f"{method}: {rows[method]['round_s']:.2f} s, kernels {rows[method]['kernels_ms']:.0f} ms: {shares}")
        (arguments.out / "profile.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
