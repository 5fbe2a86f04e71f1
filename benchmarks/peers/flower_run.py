"""The job on Flower's simulation (Beutel et al., Flower, 2020): its apps and its FedAvg on Ray actors."""

from __future__ import annotations

import os
from pathlib import Path

import flower_client
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import Job, run_job
from torch import Tensor

ACTORS = 2
LONGEST = 600.0  # seconds of a round


def work(folder: Path) -> dict[str, Tensor]:
    """All nodes in every round, at most `ACTORS` at a time with one CPU each."""
    job, server = Job(folder), ServerApp()
    weights: dict[str, Tensor] = {}

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=job.sites, min_available_nodes=job.sites)
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(job.new_net().state_dict()),
            num_rounds=job.rounds,
            timeout=LONGEST,
            train_config=ConfigRecord({"folder": str(folder)}),
        )
        weights.update(result.arrays.to_torch_state_dict())

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where actors find the client and the job
    run_simulation(
        server_app=server,
        client_app=flower_client.app,
        num_supernodes=job.sites,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": ACTORS},
        },
    )
    if not weights:
        raise SystemExit("no site answered: the log above says why")
    return weights


if __name__ == "__main__":
    run_job(work)
