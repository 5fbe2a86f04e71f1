"""FedBM's distribution term (Zhu et al., 2025, Eq. 8): generated images should look real to batch norm."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.losses._shapes import widened


def norm_statistics_gap(
    batch_means: Sequence[Tensor],
    batch_variances: Sequence[Tensor],
    running_means: Sequence[Tensor],
    running_variances: Sequence[Tensor],
) -> Tensor:
    """Sum over layers of |batch mean - running mean| + |batch variance - running variance|, Euclidean norms.

    Each sequence holds one tensor (channels,) per layer of the teacher; batch variances are the biased ones.
    A batch with the statistics of the training images gives 0.
    """
    pairs = [
        *zip(batch_means, running_means, strict=True),
        *zip(batch_variances, running_variances, strict=True),
    ]
    return torch.stack([(widened(batch) - widened(running.detach())).norm() for batch, running in pairs]).sum()
