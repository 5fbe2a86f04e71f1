"""The job as one would write it without a framework: the measure of what the others cost."""

from __future__ import annotations

from pathlib import Path

import torch
from job import Job, run_job, warm_up
from torch import Tensor


def work(folder: Path) -> dict[str, Tensor]:
    """Rounds of FedAvg over sites of one size, on one net."""
    job = Job(folder)
    net = job.new_net()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for number in range(1, job.rounds + 1):
        mean = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for site in range(job.sites):
            net.load_state_dict(state)
            job.train(net, site, number)
            for name, tensor in net.state_dict().items():
                mean[name].add_(tensor, alpha=1 / job.sites)
        state = mean
    return state


if __name__ == "__main__":
    warm_up()
    run_job(work)
