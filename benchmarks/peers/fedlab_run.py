"""The job on FedLab (Zeng et al., FedLab, JMLR 2023): its standalone pipeline, one process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from job import Job, run_job, warm_up
from torch import Tensor

try:
    import torchvision  # noqa: F401
except RuntimeError:  # one that was built for another torch; FedLab imports it, and the job needs nothing of it
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Logger, SerializationTool


class Quiet(Logger):
    """Tells nothing."""

    def __init__(self) -> None:
        with suppress(TypeError):
            super().__init__(None, None)

    def info(self, *_: Any) -> None:
        """Nothing."""


class Trainer(SGDSerialClientTrainer):
    """FedLab's serial trainer on the job's batches."""

    def __init__(self, job: Job, handler: SyncServerHandler):
        super().__init__(job.new_net(), job.sites, logger=Quiet())
        self.job, self.handler = job, handler

    def local_process(self, payload: list[Tensor], id_list: list[int]) -> None:
        """One local epoch at each site."""
        for site in id_list:
            SerializationTool.deserialize_model(self._model, payload[0])
            self.job.train(self._model, site, self.handler.round + 1)
            self.cache.append([self.model_parameters])


class Pipeline(StandalonePipeline):
    """The pipeline without its message after every round."""

    def evaluate(self) -> None:
        """The job measures nothing."""


def work(folder: Path) -> dict[str, Tensor]:
    """All sites in every round; they have the same number of images, so weights are equal."""
    job = Job(folder)
    handler = SyncServerHandler(job.new_net(), job.rounds, 1.0, logger=Quiet())
    Pipeline(handler, Trainer(job, handler)).main()
    return handler.model.state_dict()


if __name__ == "__main__":
    warm_up()
    run_job(work)
