"""The job on NVFlare's simulator (Roth et al., NVIDIA FLARE, 2022): its FedAvg recipe, at most two sites at a time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from job import Job, run_job
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from torch import Tensor

HERE = Path(__file__).parent
THREADS = 2


def work(folder: Path) -> dict[str, Tensor]:
    """All sites in every round; the weights are read back from the server's file."""
    job = Job(folder)
    recipe = FedAvgRecipe(
        name="job",
        model={"class_path": "job.SmallNet", "args": {"classes": job.classes, "pixels": job.pixels}},
        min_clients=job.sites,
        num_rounds=job.rounds,
        train_script=str(HERE / "nvflare_client.py"),
        train_args=f"{folder} {HERE}",
    )
    with tempfile.TemporaryDirectory() as place:
        env = SimEnv(num_clients=job.sites, num_threads=THREADS, workspace_root=place)
        found = Path(recipe.execute(env).get_result() or place)
        (file,) = found.rglob("FL_global_model.pt")
        return torch.load(file)["model"]


if __name__ == "__main__":
    run_job(work)
