"""Contrastive losses: between samples of a site, against prototypes of the federation, and between models."""

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core.arguments import check_shape
from equipoise.core.errors import UserError
from equipoise.losses._shapes import cross_entropy_of, cross_entropy_over, frequencies, widened


def _views_as_samples(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Features (B, V, D) and labels (B,) as one list of B * V labelled features."""
    if features.dim() != 3:
        raise UserError(f"features have the shape {tuple(features.shape)}, expected (images, views, dimensions)")
    check_shape("labels", labels.shape, features.shape[:1])
    return widened(features).flatten(0, 1), labels.long()[:, None].expand(features.shape[:2]).flatten()


def intra_client_contrastive(
    features: Tensor,
    labels: Tensor,
    class_counts: Tensor,
    power: float = 0.5,
    temperature: float = 1.0,
    floor: float = 0.07,
) -> Tensor:
    """FedIIC's supervised contrast within a site, sharper for rare classes (Wu et al., 2023, Eqs. 2-3).

    Features (B, 2, D) have unit norm. With t_ij = max(temperature (p_i p_j)^power, floor), the mean over all
    2B anchors of -mean_{j of the same class} log softmax_{j != i}(z_i z_j / t_ij). Power 0 is plain
    supervised contrast at `temperature` (or `floor`, if that is greater); a batch of one image gives 0.
    """
    samples, labels = _views_as_samples(features, labels)
    share = frequencies(class_counts, samples.dtype)[labels]
    temperatures = ((share[:, None] * share).pow(power) * temperature).clamp(min=floor)
    itself = torch.eye(len(samples), dtype=torch.bool, device=samples.device)
    scores = (samples @ samples.T / temperatures).masked_fill(itself, -torch.inf)
    positives = (labels[:, None] == labels) & ~itself
    log_likelihood = scores.log_softmax(1).masked_fill(~positives, 0.0).sum(1)
    return -(log_likelihood / positives.sum(1).clamp(min=1)).mean()


def inter_client_contrastive(features: Tensor, labels: Tensor, prototypes: Tensor, temperature: float = 0.1) -> Tensor:
    """FedIIC's contrast against the federation's prototypes: cross entropy of z V^T / temperature (Eq. 4).

    Features (B, 2, D) and prototypes (C, D) have unit norm. For prototypes at right angles to each other
    it is a cosine classifier whose weights stay where they are.
    """
    samples, labels = _views_as_samples(features, labels)
    return cross_entropy_of(samples @ prototypes.detach().to(samples.dtype).T / temperature, labels)


def model_contrastive(
    features: Tensor, global_features: Tensor, previous_features: Tensor, temperature: float = 0.5
) -> Tensor:
    """MOON's model contrast: stay close to the global model, leave the previous one (Li et al., 2021).

    Mean of -log softmax over (cos(z, z_global), cos(z, z_previous)) / temperature at the first. Features (B,
    D) of the model in training, of the global model and of the site's previous model. Where the two others
    agree it is log 2.
    """
    features = widened(features)
    closer = F.cosine_similarity(features, widened(global_features.detach()), dim=-1)
    farther = F.cosine_similarity(features, widened(previous_features.detach()), dim=-1)
    return F.softplus((farther - closer) / temperature).mean()


def prototype_contrastive(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    present: Tensor | None = None,
    temperature: float = 0.5,
) -> Tensor:
    """FedProc: cross entropy of cos(z, c_j) / temperature over the global class prototypes (Mu et al., 2023).

    Features (B, D), prototypes (C, D). Classes outside the mask `present` (C,) have no prototype: they are
    left out, and their samples contribute 0.
    """
    features = widened(features)
    cosine = F.normalize(features, dim=-1) @ F.normalize(prototypes.detach().to(features.dtype), dim=-1).T
    return cross_entropy_over(cosine / temperature, labels, present)
