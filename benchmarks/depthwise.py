"""Our depthwise convolutions beside cuDNN's on a GPU, in bfloat16 and channels-last: an EfficientNet's 16 layers.

    python benchmarks/depthwise.py [--out results/benchmarks]

Milliseconds of first calls, in which cuDNN plans and Triton compiles (once for a machine), and microseconds a call in
captured steps: forward, gradient of the input, gradient of the weight. cuDNN is given images with zeros around them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.nets.kernels import depthwise_kernels as kernels

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "a GPU"

#: side of the kernel, stride, channels, how many times smaller than the image its map is, how many such layers
LAYERS = (
    (3, 1, 32, 2, 1),
    (3, 2, 96, 2, 1),
    (3, 1, 144, 4, 1),
    (5, 2, 144, 4, 1),
    (5, 1, 240, 8, 1),
    (3, 2, 240, 8, 1),
    (3, 1, 480, 16, 2),
    (5, 1, 480, 16, 1),
    (5, 1, 672, 16, 2),
    (5, 2, 672, 16, 1),
    (5, 1, 1152, 32, 3),
    (3, 1, 1152, 32, 1),
)
#: pixels of an image, images of a batch
SETTINGS = ((128, 32), (224, 64))
REPEATS = 20
Passes = dict[str, Callable[[], Tensor]]


def first_ms(work: Callable[[], Tensor]) -> float:
    """Milliseconds of a first call."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def steady_us(work: Callable[[], Tensor]) -> float:
    """Microseconds of a call among many that are captured together."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    graph.replay()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return 1e3 * began.elapsed_time(ended) / REPEATS


def passes(side: int, stride: int, channels: int, pixels: int, batch: int) -> dict[str, Passes]:
    """The three passes of a layer, ours and cuDNN's."""
    zeros = max((-(-pixels // stride) - 1) * stride + side - pixels, 0)
    low, high = zeros // 2, zeros - zeros // 2
    images = torch.randn(batch, channels, pixels, pixels, device="cuda").bfloat16()
    images = images.contiguous(memory_format=torch.channels_last)
    usual = torch.randn(channels, 1, side, side, device="cuda").bfloat16()
    taps = kernels.by_taps(usual)
    weight = taps.permute(2, 0, 1).unsqueeze(1)  # as it lies in a quick net
    convolution, margins = kernels.DepthwiseConvolution.apply, (low, high, low, high)
    out = (pixels + zeros - side) // stride + 1
    given = torch.randn(batch, channels, out, out, device="cuda").bfloat16()
    given = given.contiguous(memory_format=torch.channels_last)
    padded = F.pad(images, margins).contiguous(memory_format=torch.channels_last)

    def ours(of_images: bool) -> Tensor:
        backward = kernels._gradient_of_x if of_images else kernels._gradient_of_weight
        return backward(given, taps if of_images else images, images if of_images else weight, stride, low, low)

    def cudnns(of_images: bool) -> Tensor:
        wanted, sizes = (of_images, not of_images, False), ((stride,) * 2, (0, 0), (1, 1), False, (0, 0), channels)
        return torch.ops.aten.convolution_backward(given, padded, usual, None, *sizes, wanted)[0 if of_images else 1]

    return {
        "ours": {
            "forward": lambda: convolution(images, weight, stride, margins),
            "of_x": lambda: ours(True),
            "of_weight": lambda: ours(False),
        },
        "cudnn": {
            "forward": lambda: F.conv2d(padded, usual, None, stride, 0, 1, channels),
            "of_x": lambda: cudnns(True),
            "of_weight": lambda: cudnns(False),
        },
    }


def measure(pixels: int, batch: int) -> dict[str, object]:
    """All layers of a net: totals, ours and cuDNN's."""
    row: dict[str, object] = {"name": f"efficientnet-{pixels}-b{batch}"}
    totals: dict[str, dict[str, float]] = {}
    for side, stride, channels, smaller, layers in LAYERS:
        for who, works in passes(side, stride, channels, pixels // smaller, batch).items():
            own = totals.setdefault(who, {"first_ms": 0.0})
            for name, work in works.items():
                own["first_ms"] += first_ms(work)
                own[f"{name}_us"] = own.get(f"{name}_us", 0.0) + layers * steady_us(work)
    return row | totals


@torch.no_grad()
def main() -> None:
    """Measure and write `depthwise.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for setting in SETTINGS:
        rows.append(measure(*setting))
        print(rows[-1], flush=True)
        (out / "depthwise.json").write_text(json.dumps({"settings": rows}, indent=1))


if __name__ == "__main__":
    main()
