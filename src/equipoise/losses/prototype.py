"""Losses that hold features or logits to class prototypes: FedNPR's sub-clusters, PRR's CPA, and FedProto."""

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core.arguments import check_choice, check_shape
from equipoise.core.errors import UserError
from equipoise.losses._shapes import cross_entropy_over, rows, widened

EPSILON = 1e-6
"""The one small constant of CPA: in the denominator, inside the logarithm, and under the cosine."""


def subcluster_scores(
    features: Tensor,
    prototypes: Tensor,
    normalise: str = "layernorm",
    temperature: float = 0.1,
    present: Tensor | None = None,
) -> Tensor:
    """How near features (B, D) are to each class: (B, C) of m_c = max_k cos(z, p_ck), normalised over classes.

    Prototypes (C, K, D), fixed. Bare cosines make a nearly flat softmax, so `normalise` sharpens them:
    "layernorm" over the classes of the mask `present` (C,) (as released), "temperature" (m / temperature) or
    "none".
    """
    check_choice("normalise", normalise, ("layernorm", "none", "temperature"))
    features = widened(features)
    directions = F.normalize(prototypes.detach().to(features.dtype), dim=-1)
    nearest = torch.einsum("bd,ckd->bck", F.normalize(features, dim=-1), directions).amax(-1)
    if normalise == "layernorm":
        return _standardise(nearest, present)
    return nearest / temperature if normalise == "temperature" else nearest


def subcluster_regularisation(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    normalise: str = "layernorm",
    temperature: float = 0.1,
    present: Tensor | None = None,
) -> Tensor:
    """FedNPR's non-parametric regularisation: cross entropy of `subcluster_scores` (Wicaksana et al., 2024, Eq. 3).

    Features (B, D), prototypes (C, K, D). `normalise="none"` is Eq. 3 as printed. Classes outside the mask
    `present` (C,) are left out. K = 1 is a nearest-mean classifier.
    """
    scores = subcluster_scores(features, prototypes, normalise, temperature, present)
    return cross_entropy_over(scores, labels, present)


def _standardise(scores: Tensor, present: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    """Layer norm of scores (B, C) over the classes present, without affine parameters."""
    if present is None:
        return F.layer_norm(scores, scores.shape[-1:], eps=epsilon)
    share = present.to(scores.dtype) / present.sum().clamp(min=1)
    centred = scores - (scores * share).sum(-1, keepdim=True)
    return centred * (centred.square() * share).sum(-1, keepdim=True).add(epsilon).rsqrt()


def imbalance_ratios(class_counts: Tensor, beta: float = 0.8) -> Tensor:
    """CPA's G (C, C), how hard samples of c push class j down: G_cj = min(1, (N_j / N_c)^beta)."""
    counts = widened(class_counts)
    # Between two classes without images, 0 / 0 counts as balanced.
    ratios = (counts / counts[:, None]).nan_to_num(nan=1.0, posinf=1.0)
    return ratios.clamp(max=1.0).pow(beta)


def alignment_weights(local_prototypes: Tensor, global_prototypes: Tensor, tau: float = 3.0) -> Tensor:
    """CPA's gamma (C,), (1 + tau) / (cos + tau): above 1 where local and global prototypes (C, D) part."""
    check_shape("global_prototypes", global_prototypes.shape, local_prototypes.shape)
    local_prototypes, global_prototypes = widened(local_prototypes), widened(global_prototypes)
    lengths = local_prototypes.norm(dim=-1) * global_prototypes.norm(dim=-1)
    cosine = (local_prototypes * global_prototypes).sum(-1) / (lengths + EPSILON)
    return ((1 + tau) / (cosine + tau)).detach()


def conjoint_prototype_aligned(
    logits: Tensor,
    labels: Tensor,
    class_counts: Tensor,
    local_prototypes: Tensor | None = None,
    global_prototypes: Tensor | None = None,
    beta: float = 0.8,
    tau: float = 3.0,
) -> Tensor:
    """PRR-Imbalance's CPA loss: mean of -gamma_y log(e^{z_y} / sum_j G_yj e^{z_j}) (Chen et al., 2022).

    Logits (B, C) or (B, C, ...), `class_counts` (C,) of the whole federation, prototypes (C, D). Without
    prototypes gamma is 1 (the global objective alone); with equal counts, or beta 0, the ratio is the
    softmax.
    """
    if (local_prototypes is None) != (global_prototypes is None):
        raise UserError("local and global prototypes belong together: give both or neither")
    z, labels = rows(widened(logits)), labels.flatten().long()
    # From the largest logit down, as released: nothing overflows, and the constants mean the same at every scale.
    exponentials = (z - z.amax(1, keepdim=True)).exp()
    ratios = imbalance_ratios(class_counts.to(z.dtype), beta)[labels]
    own = exponentials.gather(1, labels[:, None]).squeeze(1)
    losses = -(own / ((ratios * exponentials).sum(1) + EPSILON) + EPSILON).log()
    if local_prototypes is not None and global_prototypes is not None:
        gamma = alignment_weights(local_prototypes, global_prototypes, tau).to(z.dtype)
        losses = gamma[labels] * losses
    return losses.mean()


def prototype_distance(features: Tensor, labels: Tensor, prototypes: Tensor, present: Tensor | None = None) -> Tensor:
    """FedProto: mean squared difference between features and their classes' prototypes (Tan et al., 2022).

    Features (B, D), prototypes (C, D), fixed. Samples of classes outside the mask `present` (C,) contribute
    0; features on their prototypes give 0.
    """
    features, labels = widened(features), labels.long()
    targets = prototypes.to(features.dtype)[labels]
    if present is not None:
        targets = torch.where(present[labels][:, None], targets, features)
    return F.mse_loss(features, targets.detach())
