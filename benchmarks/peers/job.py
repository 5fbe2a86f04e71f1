"""The job that every engine of `benchmarks/cpu.py` runs: FedAvg with a small CNN, batch for batch the same.

A folder holds it: the sites' images, labels, their order in each round, and the settings. This file needs only
torch and numpy, so that it can be imported where Equipoise is not installed.
"""

from __future__ import annotations

import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES = 128
PIXELS = 32


def site_name(index: int) -> str:
    """Names a site; Equipoise draws the order of a site's images by its name."""
    return f"site {index}"


def make_layers(classes: int, pixels: int) -> tuple[nn.Module, nn.Linear]:
    """Body and head of the net, always with the same first weights; 544,840 parameters for 8 classes at 32 px."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (pixels // 4) ** 2, FEATURES),
            nn.ReLU(),
        )
        return body, nn.Linear(FEATURES, classes)


class SmallNet(nn.Sequential):
    """The net with its first weights; a class, since some engines make a net anew from its name."""

    def __init__(self, classes: int, pixels: int):
        body, head = make_layers(classes, pixels)
        super().__init__(OrderedDict(body=body, head=head))


def new_net(classes: int, channels: int) -> nn.Module:
    """The net for images of 32 pixels, as Equipoise asks for one."""
    return SmallNet(classes, PIXELS)


class Job:
    """The settings, and the images of all sites ready-made in memory: the fastest that a plain loop can have them."""

    def __init__(self, folder: Path):
        settings = json.loads((folder / "job.json").read_text())
        self.sites, self.rounds = settings["sites"], settings["rounds"]
        self.batch, self.lr = settings["batch"], settings["lr"]
        self.classes, self.pixels = settings["classes"], settings["pixels"]
        images = torch.from_numpy(np.load(folder / "images.npy"))
        self.images = ((images.float() / 255 - 0.5) / 0.5).chunk(self.sites)
        self.labels = torch.from_numpy(np.load(folder / "labels.npy")).chunk(self.sites)
        self.orders = torch.from_numpy(np.load(folder / "orders.npy"))  # (rounds, sites, images of a site)

    def new_net(self) -> nn.Module:
        """The net with its first weights."""
        return SmallNet(self.classes, self.pixels)

    def train(self, net: nn.Module, site: int, round_number: int) -> None:
        """One local epoch of SGD at a site; rounds count from 1."""
        net.train()
        optimiser = torch.optim.SGD(net.parameters(), self.lr)
        for rows in self.orders[round_number - 1, site].split(self.batch):
            optimiser.zero_grad()
            F.cross_entropy(net(self.images[site][rows]), self.labels[site][rows]).backward()
            optimiser.step()


def warm_up() -> None:
    """Take the first step of an optimiser, which imports much (1 s): not to be taken for the job's own time."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.sum().backward()
    torch.optim.SGD([parameter], 0.1).step()


def run_job(work: Callable[[Path], dict[str, Tensor]]) -> None:
    """The body of an engine's script, called as `SCRIPT job-folder out-folder`: work, then write time and weights.

    `work` gives the final weights of the job in a folder; what it does is timed here, imports are not. One thread.
    """
    folder, out = map(Path, sys.argv[1:3])
    torch.set_num_threads(1)
    began_wall, began_cpu = time.perf_counter(), time.process_time()
    weights = work(folder)
    facts = {"job_wall_s": time.perf_counter() - began_wall, "job_cpu_s": time.process_time() - began_cpu}
    torch.save({name: tensor.clone() for name, tensor in weights.items()}, out / "weights.pt")
    (out / "facts.json").write_text(json.dumps(facts))
