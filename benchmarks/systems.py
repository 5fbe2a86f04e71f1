"""Seconds per round of each of the four systems at its paper's setting, and the server's share, on images of noise.

    python benchmarks/systems.py [--only prr] [--device cuda] [--out results/benchmarks]

Sites, images, pixels, batches, epochs and nets are the papers' (PBC at 64 pixels); the first round, which captures, is
not counted. FedBM trains its generator in every fifth round: a fifth of that counts. `input_s` is what it takes to read
and augment all images of a round when nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equipoise.contract.method import Client, Server, Setting
from equipoise.contract.protocol import Conversation
from equipoise.data.augment import build_augmentation
from equipoise.data.federation import Federation
from equipoise.engine import training
from equipoise.engine.engine import Engine
from equipoise.engine.local_engine import LocalEngine
from equipoise.engine.runs import make_config
from equipoise.engine.training import SiteData
from equipoise.methods import get_method
from gpu import DERMOSCOPY, HAM10000, Federated, finish, synchronise

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "a GPU"


@dataclass(frozen=True)
class System:
    """A federation, and which of its sites train in a round (all where none is named).

    `rounds`: numbers of a first round, of a usual one, and of one in which the server does something that it does only
    every `every` rounds.
    """

    federated: Federated
    trains: tuple[int, ...] = ()
    rounds: tuple[int, int, int] = (1, 2, 3)
    every: int = 1


BLOOD_CELLS = ("basophil", "eosinophil", "erythroblast", "ig", "lymphocyte", "monocyte", "neutrophil", "platelet")
GENERATOR_ROUNDS: dict[str, Any] = {"rounds": (5, 6, 10), "every": 5}
SYSTEMS = {
    "prr": System(DERMOSCOPY),
    "fednpr": System(Federated("fednpr-isic", (9930, 3163, 2691, 1807, 655, 351), 224, 8)),
    "fediic": System(Federated("fediic-isic2019", (1773,) * 10, 256, 8)),
    "fedbm": System(
        Federated("fedbm-pbc-0.05", (997,) * 12, 64, 8, names=BLOOD_CELLS), tuple(range(6)), **GENERATOR_ROUNDS
    ),
    # Five sites that hold half of the images between them.
    "fedbm-ham10000": System(replace(HAM10000, pixels=128), (1, 2, 4, 7, 8), **GENERATOR_ROUNDS),
}

#: how a GPU is used at its best
CUDA = ("compute.precision='bf16'", "compute.channels_last=true", "compute.deterministic=false")


@dataclass
class Times:
    """Seconds of a round, and those of them that the server took."""

    whole: float
    server: float


def time_round(engine: Engine, server: Server, number: int, sites: Sequence[str]) -> Times:
    """Drive one round, the device idle whenever a clock is read."""
    synchronise()
    began, server_seconds = time.perf_counter(), 0.0
    engine.begin(number, 0)
    conversation: Conversation = server.round(number, sites)
    replies = None
    while True:
        server_began = time.perf_counter()
        try:
            ask = conversation.send(replies)
        except StopIteration:
            break
        finally:
            synchronise()
            server_seconds += time.perf_counter() - server_began
        replies = finish(engine.ask(ask))
        synchronise()
    engine.commit()
    return Times(time.perf_counter() - began, server_seconds)


def measure(name: str, device: str, tiny: bool) -> dict[str, float | str]:
    """One system: seconds per round and the server's share of them."""
    system = SYSTEMS[name]
    federated = system.federated
    if tiny:
        sizes, valid = (tuple(size // 100 + 2 for size in part) for part in (federated.sizes, federated.valid))
        federated = replace(federated, pixels=32, sizes=sizes, valid=valid)
    federation = federated.federation()
    settings = [
        "net.weights='none'",
        "evaluation.trained=false",
        "evaluation.trained_test=false",
        *((*CUDA, f"compute.slots={len(federation.sites)}") if device == "cuda" else ()),
        *(("augment.size=32", "train.epochs=1", "net.name='small-cnn'") if tiny else ()),
    ]
    config = make_config(federated.preset, settings)
    method = get_method(config.method)
    setting = Setting.of(config, method, federation, device)
    sites = [site.name for site in federation.sites]
    chosen = [sites[index] for index in system.trains] or sites
    with tempfile.TemporaryDirectory() as folder, LocalEngine(method, setting, federation, Path(folder)) as engine:
        server = method.server(setting)
        converse(engine, server.start(sites))
        first, usual, rare = (time_round(engine, server, number, chosen) for number in system.rounds)
        inputs = input_seconds(setting, method.client_class(config), federation, chosen)
    extra = (rare.server - usual.server) / system.every if system.every > 1 else 0.0
    whole, at_server = usual.whole + extra, usual.server + extra
    return {
        "name": name,
        "first_round_s": first.whole,
        "round_s": whole,
        "server_s": at_server,
        "server_share": at_server / whole,
        "input_s": inputs,
        "input_share": inputs / whole,
    }


def input_seconds(setting: Setting, client_class: type[Client], federation: Federation, chosen: Sequence[str]) -> float:
    """Seconds in which the images of these sites are read and augmented, site by site, for all epochs of a round."""
    client = client_class(setting)
    augmentation = build_augmentation(setting.config.augment, setting.image_size, setting.channels)
    sites = [site for site in federation.sites if site.name in chosen]
    parts = [SiteData(site, setting.task, setting.device)["train"] for site in sites]

    def make(epochs: int) -> None:
        for part in parts:
            for epoch in range(epochs):
                deque(training._epoch(client, part, augmentation, epoch), maxlen=0)
        synchronise()

    make(1)
    began = time.perf_counter()
    make(setting.config.train.epochs)
    return time.perf_counter() - began


def converse(engine: Engine, start: Conversation) -> None:
    """Lead what a server asks before the first round to its end."""
    engine.begin(0, 0)
    replies = None
    while True:
        try:
            ask = start.send(replies)
        except StopIteration:
            engine.commit()
            return
        replies = finish(engine.ask(ask))


def main() -> None:
    """Measure and write `systems.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a hundredth of the images: tries the script itself")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    arguments = parser.parse_args()
    rows = []
    for name in SYSTEMS:
        if arguments.only in name:
            rows.append(measure(name, arguments.device, arguments.tiny))
            print({key: round(v, 3) if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True)
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "systems.json").write_text(json.dumps({"systems": rows}, indent=1))


if __name__ == "__main__":
    main()
