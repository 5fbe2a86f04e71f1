"""How fast sites train on one GPU: the engine's slots beside loops as one would write them, in one run, as ratios.

    python benchmarks/gpu.py [--quick] [--only NAME] [--epochs 2] [--sharing] [--device cuda] [--out results/benchmarks]

Engine figures are of whole rounds of FedAvg: images resident as uint8, augmentation, steps, averaging; no evaluation.
Loops get their images ready-made on the device. Each is told in `LOOPS`: eager, in bfloat16 and channels-last, compiled
with little overhead, with our kernels, and replayed from CUDA graphs. A loop that fails is named with its reason.
Without a GPU, `--quick` runs every loop for two steps in float32: a dry form that measures nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from equipoise.contract.config import Config
from equipoise.contract.method import Setting
from equipoise.core.errors import first_line
from equipoise.data.federation import Federation, Site, Split
from equipoise.engine.local_engine import LocalEngine
from equipoise.engine.loop import Run
from equipoise.engine.runs import make_config
from equipoise.methods import get_method

#: name: net, pixels, batch, sites, precision, and the stream figure (img/s) that a bare replay loop reached
SETTINGS = {
    "resnet18-28-b8-n10": ("resnet18", 28, 8, 10, "tf32", 16_868),
    "resnet18-128-b8-n10": ("resnet18", 128, 8, 10, "bf16", 12_161),
    "effb0-64-b32-n10": ("efficientnet-b0", 64, 32, 10, "tf32", 14_868),
    "effb0-128-b32-n10": ("efficientnet-b0", 128, 32, 10, "bf16", 11_506),
    "effb0-224-b32-n6": ("efficientnet-b0", 224, 32, 6, "bf16", 5_009),
}


@dataclass(frozen=True)
class Loop:
    """A loop that trains the same nets without an engine.

    Attributes:
        way: eager; compiled, which is one net for all sites; or replayed, a CUDA graph on a stream for each net
        kernels: whether nets have the layers of `nets/kernels`
    """

    name: str
    bf16: bool = False
    way: str = "eager"
    kernels: bool = False


LOOPS = (
    Loop("eager"),
    Loop("eager-bf16", bf16=True),
    Loop("compiled-bf16", bf16=True, way="compiled"),
    Loop("kernels-bf16", bf16=True, kernels=True),
    Loop("replayed-bf16", bf16=True, way="replayed"),
    Loop("replayed-kernels-bf16", bf16=True, way="replayed", kernels=True),
)


class NoiseStore:
    """Images of noise: what they show does not matter for speed."""

    def __init__(self, count: int, size: int):
        self.index = SimpleNamespace(task="classification")
        self.pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (count, 3, size, size), np.uint8))

    def images(self, rows: Any) -> torch.Tensor:
        """uint8 (b, 3, size, size)."""
        return self.pixels[torch.as_tensor(rows)]

    def sample_digest(self, rows: Any) -> bytes:
        """The same always: noise does not change."""
        return b""


def noise_federation(sizes: Sequence[int], pixels: int, classes: int = 8, valid: Sequence[int] = ()) -> Federation:
    """Sites of noise images, with so many to train on and to validate on."""
    store: Any = NoiseStore(max(*sizes, *valid), pixels)
    rng = np.random.default_rng(1)

    def split(count: int) -> Split:
        return Split(store, np.arange(count), rng.integers(0, classes, count))

    sites = [Site(f"site {index}", {"train": split(count)}) for index, count in enumerate(sizes)]
    if valid:
        sites = [Site(s.name, {**s.splits, "valid": split(count)}) for s, count in zip(sites, valid)]
    return Federation("noise", tuple(f"class {index}" for index in range(classes)), tuple(sites), pixels, 3)


@dataclass(frozen=True)
class Federated:
    """A federation as a preset has it: its sites' images, stored pixels and classes, whose names some methods read."""

    preset: str
    sizes: tuple[int, ...]
    pixels: int
    classes: int
    valid: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def federation(self) -> Federation:
        """The federation, with noise for images."""
        made = noise_federation(self.sizes, self.pixels, self.classes, self.valid)
        return replace(made, classes=self.names or made.classes)


DERMOSCOPY = Federated("prr-dermoscopy", (2091, 2708, 1144, 1400), 128, 3, (298, 386, 163, 199))
#: what Dirichlet(0.05) makes of HAM10000 with seed 1; half of the sites train in a round, for one epoch
HAM10000 = Federated(
    "fedbm-ham10000-0.05",
    (987, 2, 302, 560, 54, 1621, 7, 3093, 159, 222),
    64,
    7,
    names=("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"),
)


def round_seconds(federated: Federated, method: str, rounds: int, together: int = 1) -> float:
    """Seconds per round, evaluation included, after a first round.

    With `together` runs (other seeds) in one process, the seconds of one round of all of them.
    """
    federation = federated.federation()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, together + 1):
            settings = [
                "compute.precision='bf16'",
                "compute.channels_last=true",
                "compute.deterministic=false",
                "evaluation.first_round=1",
                "evaluation.trained=false",
                "evaluation.batch_size=1024",
                "checkpoint.every=100",
                f"train.rounds={rounds + 1}",
            ]
            config = make_config(federated.preset, settings, method=method, seed=seed)
            watch = RoundClock()
            run = Run(config, get_method(method), federation, Path(folder) / str(seed), [watch], "cuda")
            runs.append((run.steps(), watch, run))
        active = [steps for steps, _, _ in runs]
        while active:
            active = [steps for steps in active if next(steps, DONE) is not DONE]
        times = [watch.times for _, watch, _ in runs]
        return (max(t[-1] for t in times) - max(t[0] for t in times)) / rounds


def sharing(rounds: int) -> list[dict[str, float | str]]:
    """How much more four runs of a federation get done in one process than one after the other."""
    rows: list[dict[str, float | str]] = []
    for federated, method, number in (
        (DERMOSCOPY, "fedavg", 2),
        (HAM10000, "fedavg", rounds),
        (HAM10000, "fedbm", rounds),
    ):
        one, four = round_seconds(federated, method, number), round_seconds(federated, method, number, 4)
        rows.append({"name": federated.preset, "method": method, "one_s": one, "four_s": four, "ratio": 4 * one / four})
        print(f"{federated.preset} {method}: four runs at once x{4 * one / four:.2f} one after the other", flush=True)
    return rows


DONE = object()
#: local epochs of a round of the dermoscopic federation
EPOCHS = 5


class RoundClock:
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def event(self, event: str, **_: object) -> None:
        """Take the time."""
        if event == "round":
            self.times.append(time.perf_counter())


def config_of(net: str, batch: int, precision: str, steps: int, *more: str) -> Config:
    """FedAvg with Adam."""
    return make_config(
        None,
        [
            f"net.name='{net}'",
            f"train.batch_size={batch}",
            f"train.steps={steps}",
            "train.optimiser.name='adam'",
            "train.optimiser.lr=0.0001",
            f"compute.precision='{precision}'",
            "compute.deterministic=false",
            "compute.channels_last=true",
            "augment.name='flips'",
            "net.dropout=0.0",  # as in the bare replay loop that the figures stand beside
            *(["net.drop_connect=0.0"] if net.startswith("efficientnet") else []),
            "evaluation.trained=false",
            *more,
        ],
    )


def synchronise() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def loop_speed(loop: Loop, config: Config, federation: Federation, steps: int, device: str) -> float:
    """Images per second of a loop over the sites' nets; bfloat16 is channels-last, and on a GPU alone."""
    compute = {"channels_last": loop.kernels, "precision": "bf16" if loop.kernels and device == "cuda" else "fp32"}
    plain = config.model_copy(update={"compute": config.compute.model_copy(update=compute)})
    setting = Setting.of(plain, get_method("fedavg"), federation, device)
    batch, size, sites = config.train.batch_size, federation.image_size, len(federation.sites)
    layout = torch.channels_last if loop.bf16 else torch.contiguous_format
    images = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=layout)
    labels = torch.randint(0, 8, (batch,), device=device)

    def new_step() -> Callable[[], None]:
        net = setting.new_net().train().to(memory_format=layout)
        forward: Any = net
        if loop.way == "compiled":
            forward = torch.compile(net, **(COMPILED if device == "cuda" else {"backend": "eager"}))
        options = {"capturable": True} if loop.way == "replayed" and device == "cuda" else {}
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-4, foreach=True, **options)

        def step() -> None:
            optimiser.zero_grad()
            with torch.autocast(device, torch.bfloat16, loop.bf16 and device == "cuda", cache_enabled=False):
                loss = F.cross_entropy(forward(images), labels)
            loss.backward()
            optimiser.step()

        return replayed(step) if loop.way == "replayed" and device == "cuda" else step

    own = [new_step()] * sites if loop.way == "compiled" else [new_step() for _ in range(sites)]

    def go(count: int) -> None:
        for _ in range(count):
            for step in own:
                step()
        synchronise()

    go(2)
    began = time.perf_counter()
    go(steps)
    return sites * batch * steps / (time.perf_counter() - began)


COMPILED = {"mode": "reduce-overhead"}


def replayed(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph that is replayed on a stream of its own."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def again() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    return again


def engine_speed(config: Config, federation: Federation, rounds: int, slots: int, device: str) -> dict[str, float]:
    """Images per second of whole rounds through the engine, after a first round that captures."""
    method = get_method("fedavg")
    config = config.model_copy(update={"compute": config.compute.model_copy(update={"slots": slots})})
    setting = Setting.of(config, method, federation, device)
    sites = [site.name for site in federation.sites]
    with tempfile.TemporaryDirectory() as folder, LocalEngine(method, setting, federation, Path(folder)) as engine:
        server = method.server(setting)
        times = []
        for number in range(1, rounds + 2):
            synchronise()
            began = time.perf_counter()
            engine.begin(number, 0)
            conversation = server.round(number, sites)
            replies = finish(engine.ask(next(conversation)))
            try:
                conversation.send(replies)
            except StopIteration:
                engine.commit()
            synchronise()
            times.append(time.perf_counter() - began)
        slots_used = getattr(engine.place, "slots", [])
        assert config.train.steps is not None
        return {
            "img_s": len(sites) * config.train.steps * config.train.batch_size / min(times[1:]),
            "first_round_s": times[0],
            "capture_s": sum(slot.run_step.seconds for slot in slots_used),
            "slots": len(slots_used),
            "memory_gb": torch.cuda.max_memory_reserved() / 2**30 if slots_used else 0.0,
        }


def finish(work: Any) -> Any:
    """Run a generator to its end; gives what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value


def measure(name: str, steps: int, device: str, dry: bool = False) -> dict[str, Any]:
    """One setting: every loop, then the engine with a slot per site."""
    net, size, batch, sites, precision, reference = SETTINGS[name]
    sites = 2 if dry else sites
    config = config_of(net, batch, "fp32" if dry else precision, steps)
    federation = noise_federation([batch * (2 if dry else 20)] * sites, size)
    loops: dict[str, float] = {}
    failed: dict[str, str] = {}
    for loop in LOOPS:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.compiler.reset()
        try:
            loops[loop.name] = loop_speed(loop, config, federation, 5 if device == "cuda" else 1, device)
        except RuntimeError as problem:
            failed[loop.name] = first_line(problem)
    engine = engine_speed(config, federation, 1 if dry else 3, sites, device)
    return {
        "name": name,
        "eager_img_s": loops["eager"],
        "engine_img_s": engine.pop("img_s"),
        **engine,
        "reference_img_s": reference,
        "precision": precision,
        "loops_img_s": loops,
        "failed": failed,
    }


def show(row: dict[str, Any]) -> None:
    """The lines of a setting."""
    print(
        f"{row['name']:<22} engine {row['engine_img_s']:8.0f} img/s, captures {row['capture_s']:.1f} s, "
        f"{row['memory_gb']:.1f} GB",
        flush=True,
    )
    for name, speed in row["loops_img_s"].items():
        print(f"  {name:<22} {speed:8.0f} img/s   engine x{row['engine_img_s'] / speed:.2f}", flush=True)
    for name, why in row["failed"].items():
        print(f"  {name:<22} failed: {why}", flush=True)


def main() -> None:
    """Measure every setting and write `gpu.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--epochs", type=int, default=0, help="rounds of the dermoscopic federation to time")
    parser.add_argument("--sharing", action="store_true", help="also four runs in one process against one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    arguments = parser.parse_args()
    dry = arguments.device == "cpu"
    if dry and not arguments.quick:
        raise SystemExit("this machine has no GPU; --quick tries the script on a CPU and measures nothing")
    steps = 2 if dry else 60 if arguments.quick else 100
    rows = []
    for name in [*SETTINGS][: 1 if dry else None]:
        if arguments.only in name:
            rows.append(measure(name, steps, arguments.device, dry))
            show(rows[-1])
            _write(arguments.out / "gpu.json", settings=rows)
    for method in ("fedavg", "prr") if arguments.epochs else ():
        seconds = round_seconds(DERMOSCOPY, method, arguments.epochs) / EPOCHS
        print(f"{method}: {seconds:.3f} s per local epoch of the dermoscopic federation", flush=True)
        _write(arguments.out / "gpu.json", **{f"{method}_epoch_s": seconds})
    if arguments.sharing:
        _write(arguments.out / "gpu.json", four_runs=sharing(12))
    if not arguments.quick:
        _write(arguments.out / "gpu.json", slots=slot_scaling(arguments.device))


def _write(path: Path, **figures: Any) -> None:
    """Add figures to a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    if "settings" in figures:
        known["capture_s"] = max(row["capture_s"] for row in figures["settings"])
    path.write_text(json.dumps({**known, **figures}, indent=1))


def slot_scaling(device: str) -> list[dict[str, float]]:
    """Images per second of 16 sites on 1, 2, 4, 8 and 16 slots."""
    config = config_of("resnet18", 8, "bf16", 40)
    federation = noise_federation([160] * 16, 64)
    rows: list[dict[str, float]] = []
    for slots in (1, 2, 4, 8, 16):
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        rows.append({"slots": slots, **engine_speed(config, federation, 2, slots, device)})
        ratio = rows[-1]["img_s"] / rows[0]["img_s"]
        print(f"{slots:>3} slots {rows[-1]['img_s']:8.0f} img/s   x{ratio:.1f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
