"""What a round costs between processes on Flower, beside the local engine: seconds, bytes, and where the time goes.

    python benchmarks/flower.py [--sites 2 4 8] [--rounds 3] [--net resnet18]

Every site is a process of its own on this machine, with TLS; the phantom's images are few, so that what is left of a
round is Flower's share: looking for messages (a SuperNode does every 3 s), encoding, and moving bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from equipoise.config import Config
from equipoise.deploy.pilot import lay_out, running_sites
from equipoise.deploy.server import conduct, running_superlink
from equipoise.deploy.settings import ServerFile
from equipoise.runs import execute, make_config

COLUMNS = ("sites", "engine", "s/round", "training s", "other s", "MB down/site", "MB up/site")


def config_of(sites: int, rounds: int, net: str) -> Config:
    """A few steps of FedAvg on small images."""
    phantom = {"sites": sites, "images": 60 * sites, "size": 32}
    return make_config(
        None,
        ["train.steps=2", "train.batch_size=8", f"evaluation.every={rounds}", "evaluation.trained=false"],
        method="fedavg",
        net={"name": net},
        data={"phantom": phantom},
        train={"rounds": rounds},
        compute={"device": "cpu"},
    )


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The events of the rounds after the first, which also sends what an evaluation had sent before it."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "round" and line["round"] > 1]


def row(sites: int, engine: str, folder: Path) -> tuple[str, ...]:
    """The medians of a run's rounds. Local sites train one after another, those on Flower at the same time."""
    rounds = rounds_of(folder)
    join = sum if engine == "local" else max
    seconds = median(r["seconds"] for r in rounds)
    training = median(join(site["seconds"] for site in r["sites"].values()) for r in rounds)
    down = median(site["received"] for r in rounds for site in r["sites"].values()) / 1e6
    up = median(site["sent"] for r in rounds for site in r["sites"].values()) / 1e6
    numbers = (f"{seconds:.2f}", f"{training:.2f}", f"{seconds - training:.2f}", f"{down:.1f}", f"{up:.1f}")
    return (str(sites), engine, *numbers)


def measure(sites: int, rounds: int, net: str, folder: Path) -> list[tuple[str, ...]]:
    """The same config on both engines."""
    config = config_of(sites, rounds, net)
    local = execute(config, folder / "local")
    server, files = lay_out(folder / "consortium", config)
    settings = ServerFile.read(server)
    with running_superlink(settings, insecure=False) as link, running_sites(files):
        apart = conduct(config, settings, folder / "flower", link)
    return [row(sites, "local", local), row(sites, "flower", apart)]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--net", default="resnet18")
    options = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for sites in options.sites:
        with tempfile.TemporaryDirectory() as folder:
            for cells in measure(sites, options.rounds, options.net, Path(folder)):
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
