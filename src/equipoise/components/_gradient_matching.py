"""CReFF's federated features: features made up on the server whose gradients are those of the sites' real ones.

A classifier here is a matrix (C, D), or (C, D + 1) with its bias as the last column; `with_constant` gives features the
1 that the bias goes with. Shang et al., 2022, Section 4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.contract.repeat import Repeated
from equipoise.losses import membership

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


class FeatureFitting:
    """What the server does with federated features, on tensors that stay where they are: a GPU captures the steps."""

    def __init__(
        self,
        features: Tensor,
        classifier: Tensor,
        feature_lr: float,
        classifier_lr: float,
        batch: int,
        capture: bool = True,
    ):
        """Features (C, M, D) and a classifier, (C, D) or (C, D + 1), of the shapes to come."""
        num_classes, count, _ = features.shape
        self.feature_lr, self.classifier_lr, self.batch = feature_lr, classifier_lr, batch
        self.features, self.classifier = features.clone(), classifier.clone()
        self.targets = classifier.new_zeros(num_classes, *classifier.shape)
        self.known = classifier.new_zeros(num_classes, dtype=torch.bool)
        self.inputs = with_constant(features.flatten(0, 1), classifier).clone()
        labels = torch.arange(num_classes, device=features.device).repeat_interleave(count)
        self.members = membership(labels, num_classes, self.inputs.dtype)
        self.random = torch.Generator(features.device)
        self._matching = Repeated(features.device, capture=capture)
        self._retraining = Repeated(features.device, self.random, capture)

    def match(self, features: Tensor, classifier: Tensor, targets: Tensor, known: Tensor, steps: int) -> Tensor:
        """Features (C, M, D) after gradient descent on their matching loss; classes not `known` (C,) stay."""
        self.features.copy_(features)
        self.classifier.copy_(classifier)
        self.targets.copy_(targets)
        self.known.copy_(known)
        self._matching(self._match_step, steps)
        return self.features.clone()

    def _match_step(self) -> None:
        features = self.features.detach().requires_grad_()
        losses = matching_loss(feature_gradients(features, self.classifier), self.targets, features.shape[-1])
        (slope,) = torch.autograd.grad(losses.masked_fill(~self.known, 0.0).sum(), features)
        self.features.sub_(slope, alpha=self.feature_lr)

    @torch.no_grad()
    def retrain(self, features: Tensor, epochs: int, random: torch.Generator) -> Tensor:
        """A new classifier, trained by plain SGD on features (C, M, D), as many of each class."""
        size = features.shape[-1]
        self.random.set_state(random.get_state())
        self.classifier.uniform_(-(size**-0.5), size**-0.5, generator=self.random)
        self.inputs[:, :size] = features.flatten(0, 1)
        self._retraining(self._retrain_epoch, epochs)
        return self.classifier.clone()

    @torch.no_grad()
    def _retrain_epoch(self) -> None:
        # Random numbers in order are a permutation that a capture can draw.
        order = torch.rand(len(self.inputs), generator=self.random, device=self.inputs.device).argsort()
        for rows in order.split(self.batch):
            some = self.inputs[rows]
            residuals = (some @ self.classifier.T).softmax(1) - self.members[rows]
            self.classifier.addmm_(residuals.T, some, alpha=-self.classifier_lr / len(rows))
