"""The job on Equipoise: FedAvg through the whole engine, event log, checkpoints and written-out model included.

Settings after the two folders (`compute.workers=2`) change the run; `net.name=...` takes one of Equipoise's nets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import job
import numpy as np
from job import run_job, site_name
from torch import Tensor

from equipoise.data.federation import Federation, Site, Split
from equipoise.data.store import Store, StoreIndex, write_index
from equipoise.engine.loop import Run
from equipoise.engine.payload_files import read_payload
from equipoise.engine.runs import make_config
from equipoise.methods import get_method


def federation_of(folder: Path, sites: int, classes: int, pixels: int) -> Federation:
    """The job's sites; images stay in their file, which is read through a memory map. Nothing to evaluate on."""
    every = np.load(folder / "labels.npy")
    labels, rows = np.split(every, sites), np.split(np.arange(len(every)), sites)
    names, unknown = tuple(f"class {index}" for index in range(classes)), ("",) * len(every)
    images = tuple(f"image {index}" for index in range(len(every)))
    owners = tuple(site_name(index) for index in range(sites) for _ in labels[index])
    write_index(
        folder,
        StoreIndex("job", names, images, every, owners, images, unknown, unknown, np.arange(len(every))),
    )
    store = Store(folder)
    return Federation(
        name="job",
        classes=names,
        sites=tuple(Site(site_name(i), {"train": Split(store, rows[i], labels[i])}) for i in range(sites)),
        image_size=pixels,
        channels=3,
    )


def work(folder: Path) -> dict[str, Tensor]:
    """A run in a folder of its own; the weights are read back from what it wrote."""
    told, settings, out = json.loads((folder / "job.json").read_text()), sys.argv[3:], Path(sys.argv[2]) / "run"
    named = any(setting.startswith("net.name") for setting in settings)
    config = make_config(
        None,
        [
            f"seed={told['seed']}",
            f"train.rounds={told['rounds']}",
            "train.epochs=1",
            f"train.batch_size={told['batch']}",
            f"train.optimiser.lr={told['lr']}",
            "train.optimiser.momentum=0.0",
            "augment.name='none'",
            "augment.normalise='half'",
            "compute.device='cpu'",
            *([] if named else [f"net.name={job.__file__}:new_net"]),
            *settings,
        ],
    )
    federation = federation_of(folder, told["sites"], told["classes"], told["pixels"])
    Run(config, get_method("fedavg"), federation, out).execute()
    weights = read_payload(out / "models" / "global.safetensors")["model"]
    assert isinstance(weights, dict)
    return {name.replace("body.module.", ""): tensor for name, tensor in weights.items()}


if __name__ == "__main__":
    run_job(work)
