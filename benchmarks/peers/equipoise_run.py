"""The job on Equipoise: FedAvg through the whole engine, event log, checkpoints and written-out model included.

Settings after the two folders (`compute.workers=2`) change the run; `net.name=...` takes one of Equipoise's nets.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from job import make_layers, run_job, site_name
from torch import Tensor

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.method import Setting
from equipoise.data.federation import Federation, Site, Split
from equipoise.data.store import Store
from equipoise.engine.loop import Run
from equipoise.engine.payload_files import read_payload
from equipoise.engine.runs import make_config
from equipoise.methods import get_method
from equipoise.nets import Net


def job_net(setting: Setting) -> Net:
    """The job's net as Equipoise sees nets."""
    return setting.seeded("net", lambda: Net(*make_layers(setting.num_classes, setting.image_size)))


class JobServer(FedAvgServer):
    """FedAvg's server with the job's net."""

    def build(self) -> Net:
        return job_net(self.setting)


class JobClient(FedAvgClient):
    """FedAvg's client with the job's net."""

    def new_net(self) -> Net:
        return job_net(self.setting)


def federation_of(folder: Path, sites: int, classes: int, pixels: int) -> Federation:
    """The job's sites; images stay in their file, which is read through a memory map. Nothing to evaluate on."""
    labels = np.split(np.load(folder / "labels.npy"), sites)
    rows = np.split(np.arange(sum(map(len, labels))), sites)
    store = Store(folder)
    return Federation(
        name="job",
        classes=tuple(f"class {index}" for index in range(classes)),
        sites=tuple(Site(site_name(i), {"train": Split(store, rows[i], labels[i])}) for i in range(sites)),
        image_size=pixels,
        channels=3,
    )


def work(folder: Path) -> dict[str, Tensor]:
    """A run in a folder of its own; the weights are read back from what it wrote."""
    job, settings, out = json.loads((folder / "job.json").read_text()), sys.argv[3:], Path(sys.argv[2]) / "run"
    config = make_config(
        None,
        [
            f"seed={job['seed']}",
            f"train.rounds={job['rounds']}",
            f"train.batch_size={job['batch']}",
            f"train.optimiser.lr={job['lr']}",
            "train.optimiser.momentum=0.0",
            "augment.name='none'",
            "augment.normalise='half'",
            "compute.device='cpu'",
            *settings,
        ],
    )
    method = get_method("fedavg")
    if not any(setting.startswith("net.name") for setting in settings):
        method = replace(method, server=JobServer, client=JobClient)
    federation = federation_of(folder, job["sites"], job["classes"], job["pixels"])
    Run(config, method, federation, out).execute()
    weights = read_payload(out / "models" / "global.safetensors")["model"]
    assert isinstance(weights, dict)
    return weights


if __name__ == "__main__":
    run_job(work)
