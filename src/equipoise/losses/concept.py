"""FedBM's losses (Zhu et al., 2025): a classifier made of text concepts; variety among generated images."""

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.losses._shapes import cross_entropy_of, membership, widened

Scale = float | Tensor


def concept_logits(features: Tensor, mean: Tensor, variance: Tensor, temperature: Scale) -> Tensor:
    """Logits (B, C) of a fixed Gaussian per class: tau (h mu_c + tau/2 h^2 sigma_c), h of unit norm.

    Features (B, D) before normalisation, mean and variance (C, D). With no variance it is a cosine classifier
    scaled by tau.
    """
    h = F.normalize(widened(features), dim=-1)
    return temperature * (h @ mean.to(h.dtype).T + temperature / 2 * (h.square() @ variance.to(h.dtype).T))


def concept_alignment(features: Tensor, labels: Tensor, mean: Tensor, variance: Tensor, temperature: Scale) -> Tensor:
    """Mean of the cross entropy of `concept_logits` + tau^2/2 h^2 sigma_y.

    It bounds the expected cross entropy over all texts of the classes. Features (B, D) before normalisation,
    mean and variance (C, D); with no variance it is the cross entropy of a scaled cosine classifier.
    """
    logits = concept_logits(features, mean, variance, temperature)
    uncertainty = F.normalize(widened(features), dim=-1).square() * variance.to(logits.dtype)[labels.long()]
    return cross_entropy_of(logits, labels) + (temperature**2 / 2 * uncertainty.sum(-1)).mean()


def diversity(codes: Tensor, images: Tensor, labels: Tensor, num_classes: int, epsilon: float = 1e-5) -> Tensor:
    """FedBM's L_div, which keeps a generator from drawing one image per class.

    Per class the mean over pairs of 1 / (|image gap| / |code gap| + epsilon), the gaps being sums of absolute
    differences; summed over classes, over num_classes. Codes (B, Z), images (B, ...), labels (B,). A class
    with fewer than two samples contributes 0.
    """
    codes, images = widened(codes), widened(images).flatten(1)
    # Each pair is there twice, and its gradient is the same both ways: one of them is followed, and doubled.
    gaps = torch.cdist(images, images.detach(), p=1)
    image_gaps = 2 * gaps - gaps.detach()
    code_gaps = torch.cdist(codes, codes, p=1).to(image_gaps.dtype)
    # Written as code / (image + epsilon code), a sample paired with itself, or with its double, counts 0.
    inverse = code_gaps / (image_gaps + epsilon * code_gaps).masked_fill(code_gaps == 0, 1.0)
    members = membership(labels, num_classes, inverse.dtype)
    sizes = members.sum(0)
    sums = ((inverse @ members) * members).sum(0)
    return (sums / (sizes * (sizes - 1)).clamp(min=1)).sum() / num_classes
