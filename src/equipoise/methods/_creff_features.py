"""CReFF's federated features: features made up on the server whose gradients are those of the sites' real ones.

A classifier here is a matrix (C, D), or (C, D + 1) with its bias as the last column; `with_constant` gives features the
1 that the bias goes with. Shang et al., 2022, Section 4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.losses import membership
from equipoise.methods.common import shuffled_batches

EPSILON = 1e-6  # under the cosines, as released: gradients that have all but vanished need not match


def with_constant(features: Tensor, classifier: Tensor) -> Tensor:
    """Features (..., D), with a 1 after them where the classifier has a bias."""
    return F.pad(features, (0, classifier.shape[1] - features.shape[-1]), value=1.0)


def gradient_sums(features: Tensor, labels: Tensor, classifier: Tensor) -> Tensor:
    """The classifier's cross-entropy gradients on features (B, D), summed by class: (C, C, D or D + 1)."""
    num_classes = len(classifier)
    inputs = with_constant(features, classifier)
    members = membership(labels, num_classes, inputs.dtype)
    residuals = (inputs @ classifier.T).softmax(1) - members
    by_class = (members[:, :, None] * residuals[:, None]).flatten(1)
    return (by_class.T @ inputs).unflatten(0, (num_classes, num_classes))


def feature_gradients(features: Tensor, classifier: Tensor) -> Tensor:
    """The classifier's mean cross-entropy gradient on the M features (C, M, D) of each class: (C, C, D or D + 1)."""
    inputs = with_constant(features, classifier)
    own = torch.eye(len(features), dtype=inputs.dtype, device=inputs.device)[:, None]
    residuals = (inputs @ classifier.T).softmax(2) - own
    return residuals.transpose(1, 2) @ inputs / features.shape[1]


def matching_loss(gradients: Tensor, targets: Tensor, size: int) -> Tensor:
    """How far the gradients (C, C, D or D + 1) of each class are from their targets, (C,): 1 - cosine, summed over the
    rows of the weights (the first `size` columns), and for the bias as one vector."""
    loss = (1 - _cosine(gradients[..., :size], targets[..., :size])).sum(1)
    if gradients.shape[-1] > size:
        loss = loss + 1 - _cosine(gradients[..., size], targets[..., size])
    return loss


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1) + EPSILON)


def match_gradients(
    features: Tensor, classifier: Tensor, targets: Tensor, known: Tensor, steps: int, lr: float
) -> Tensor:
    """Federated features (C, M, D) after gradient descent on their matching loss; classes not `known` (C,) stay."""
    for _ in range(steps):
        features = features.detach().requires_grad_()
        losses = matching_loss(feature_gradients(features, classifier), targets, features.shape[-1])
        (slope,) = torch.autograd.grad(losses.masked_fill(~known, 0.0).sum(), features)
        features = features - lr * slope
    return features.detach()


@torch.no_grad()
def retrain_classifier(
    features: Tensor, shape: torch.Size, epochs: int, batch: int, lr: float, generator: torch.Generator
) -> Tensor:
    """A new classifier of this shape, (C, D) or (C, D + 1), trained by plain SGD on features (C, M, D), as many of each
    class."""
    num_classes, count, size = features.shape
    classifier = torch.empty(shape, device=features.device).uniform_(-(size**-0.5), size**-0.5, generator=generator)
    inputs = with_constant(features.flatten(0, 1), classifier)
    labels = torch.arange(num_classes, device=features.device).repeat_interleave(count)
    members = membership(labels, num_classes, inputs.dtype)
    for rows in shuffled_batches(len(inputs), batch, epochs, generator):
        some = inputs[rows]
        residuals = (some @ classifier.T).softmax(1) - members[rows]
        classifier.addmm_(residuals.T, some, alpha=-lr / len(rows))
    return classifier
