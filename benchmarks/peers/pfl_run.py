"""The job on pfl (Granqvist et al., pfl-research, 2024): its backend, model and FedAvg, one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from job import Job, run_job, warm_up
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

NEVER = 10**6  # rounds between evaluations


class Classifier(nn.Module):
    """The job's net with the two functions that pfl asks of a model."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def loss(self, images: Tensor, labels: Tensor, **_: Any) -> Tensor:
        """Cross entropy."""
        return nn.functional.cross_entropy(self.net(images), labels)

    def metrics(self, *_: Any, **__: Any) -> dict[str, Any]:
        """None: the job measures nothing."""
        return {}


class JobAveraging(FederatedAveraging):
    """FedAvg whose users train on the job's batches."""

    def __init__(self, job: Job):
        super().__init__()
        self.job = job

    def train_one_user(self, initial_model_state: Any, model: Any, user_dataset: Any, central_context: Any) -> Any:
        """One local epoch; gives the change of the model."""
        round_number = central_context.current_central_iteration + 1
        self.job.train(model.pytorch_model.net, int(user_dataset.user_id), round_number)
        return model.get_model_difference(initial_model_state), Metrics()


def work(folder: Path) -> dict[str, Tensor]:
    """All users in every cohort, weighted by their number of images."""
    job = Job(folder)

    def user(name: str) -> PyTorchTensorDataset:
        return PyTorchTensorDataset((job.images[int(name)], job.labels[int(name)]), user_id=name)

    users = FederatedDataset(user, MinimizeReuseUserSampler([str(site) for site in range(job.sites)]))
    classifier = Classifier(job.new_net())
    JobAveraging(job).run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=NEVER,
            train_cohort_size=job.sites,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(
            classifier,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(classifier.parameters(), lr=1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=job.lr, local_num_epochs=1, local_batch_size=job.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[],
    )
    return classifier.net.state_dict()


if __name__ == "__main__":
    warm_up()
    run_job(work)
