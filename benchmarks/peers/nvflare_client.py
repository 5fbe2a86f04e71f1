"""The site side of the job on NVFlare: a script that its simulator runs for every site."""

from __future__ import annotations

import sys
from pathlib import Path

import nvflare.client as flare
import torch

folder, here = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, here)  # the simulator runs a copy of this file elsewhere

from job import Job  # noqa: E402 - found only now

torch.set_num_threads(1)
flare.init()
job, site = Job(folder), int(flare.get_site_name().rpartition("-")[2]) - 1
while flare.is_running():
    received = flare.receive()
    net = job.new_net()
    net.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
    job.train(net, site, received.current_round + 1)
    images = {"NUM_STEPS_CURRENT_ROUND": len(job.labels[site])}
    flare.send(flare.FLModel(params=net.state_dict(), meta=images))
