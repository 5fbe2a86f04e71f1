"""Prototypes outside the training step: FedNPR's sub-clusters (Wicaksana et al., 2024), FedIIC's orthogonal
prototypes (Wu et al., 2023), FedBM's concept statistics (Zhu et al., 2025), PRR's global prototypes (Chen et
al., 2022), and class vectors at equal angles (FedNH, Dai et al., 2023; FedETF, Li et al., 2023)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core.arguments import check_choice, check_shape
from equipoise.core.errors import UserError
from equipoise.losses import widened, working_dtype

#: a sum of unit vectors shorter than this has no direction: it is a rounding error
NO_LENGTH = 1e-9


def sinkhorn(similarity: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    """Balanced soft assignment (n, K) of n samples to K clusters, from similarities (n, K) (FedNPR, Eq. 1).

    exp(similarity / epsilon), scaled in turn to equal cluster totals and to rows that sum to 1; computed with
    logarithms, which cannot overflow, in float64, or else many iterations would add up roundings. One cluster
    takes every sample whole.
    """
    if not epsilon > 0:
        raise UserError(f"epsilon={epsilon}: the width of an assignment must be above 0")
    plan = similarity.double() / epsilon
    plan = plan - plan.logsumexp((0, 1)) + math.log(max(len(plan), 1))
    for _ in range(iterations):
        plan = plan - plan.logsumexp(0, keepdim=True)
        plan = plan - plan.logsumexp(1, keepdim=True)
    return plan.exp().to(working_dtype(similarity))


def _assign_balanced(similarity: Tensor, generator: torch.Generator | None) -> Tensor:
    """The cluster (n,) that holds most of each sample in the paper's balanced assignment."""
    return sinkhorn(similarity).argmax(1)


def _assign_randomly(similarity: Tensor, generator: torch.Generator | None) -> Tensor:
    """A uniform draw (n,): the control that says whether clustering matters."""
    size, num_clusters = similarity.shape
    return torch.randint(num_clusters, (size,), generator=generator, device=similarity.device)


def _assign_as_released(similarity: Tensor, generator: torch.Generator | None) -> Tensor:
    """The draw (n,) that the released code makes, in effect at random.

    There similarity is a cost, so the transport plan favours the least similar prototype; and a Gumbel
    draw takes the plan's entries, about 1 / (n K), for logits, so that the noise drowns them.
    """
    plan = (-similarity / 0.05).softmax(1) / len(similarity)
    return (plan - torch.empty_like(plan).exponential_(generator=generator).log()).argmax(1)


CLUSTERINGS = {"sinkhorn": _assign_balanced, "random": _assign_randomly, "released": _assign_as_released}


@torch.no_grad()
def update_subclusters(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    cluster: str = "sinkhorn",
    generator: torch.Generator | None = None,
) -> Tensor:
    """New prototypes (C, K, D) of unit norm: the mean direction of each sub-cluster of each class.

    Features (N, D), labels (N,), prototypes (C, K, D). A sub-cluster that is empty, or whose members cancel out, and
    every one of a class with fewer than two samples, keeps its old prototype. With K = 1 a prototype is the mean
    direction of its class.

    `cluster` says who belongs together: "sinkhorn" is the paper's balanced assignment; "random" (uniform) and
    "released" (what the released code does, nearly the same) are controls that draw from `generator`.
    """
    check_choice("cluster", cluster, CLUSTERINGS)
    # In float64: where samples are alike, or fewer than the sub-clusters, several hold all but the same share of one,
    # and which is largest would be a matter of rounding in single precision.
    updated = F.normalize(prototypes.double(), dim=-1)
    for label, subclusters in enumerate(updated):
        members = F.normalize(features[labels == label].double(), dim=-1)
        if len(members) > 1:
            assigned = CLUSTERINGS[cluster](members @ subclusters.T, generator)
            chosen = F.one_hot(assigned, len(subclusters)).double()
            sums = chosen.T @ members
            updated[label] = torch.where(sums.norm(dim=-1, keepdim=True) > NO_LENGTH, sums, subclusters)
    return F.normalize(updated, dim=-1).to(working_dtype(features))


@torch.no_grad()
def orthogonalise(prototypes: Tensor, steps: int = 1000, lr: float = 0.1, diagonal: str = "zero") -> Tensor:
    """Unit prototypes (C, D), driven apart by gradient descent on sum_i max_j cos(v_i, v_j) (FedIIC, Eq. 5).

    With diagonal "zero" (as released) a prototype rests once no cosine is above 0: nearly right angles. With
    "exclude" (Eq. 5 as printed) the maximum is over j != i, and C <= D + 1 prototypes end as a simplex.
    """
    check_choice("diagonal", diagonal, ("zero", "exclude"))
    vectors = widened(prototypes).clone()
    for _ in range(steps):
        drive_apart(vectors, lr, diagonal)
    return F.normalize(vectors, dim=1)


@torch.no_grad()
def drive_apart(vectors: Tensor, lr: float = 0.1, diagonal: str = "zero") -> None:
    """One step of `orthogonalise`, on vectors (C, D) in place."""
    floor = 0.0 if diagonal == "zero" else -torch.inf
    lengths = vectors.norm(dim=1, keepdim=True).clamp_(min=1e-12)
    units = vectors / lengths
    largest = (units @ units.T).fill_diagonal_(floor).max(1, keepdim=True)
    others = torch.arange(len(vectors), device=vectors.device)
    pairs = ((largest.indices == others) & (largest.values > floor)).to(vectors.dtype)
    # d cos(v_i, v_j) / d v_i is the part of u_j at right angles to u_i, over |v_i|.
    pull = (pairs + pairs.T) @ units
    pull -= (pull * units).sum(1, keepdim=True) * units
    vectors -= pull.div_(lengths).mul_(lr)


def concept_statistics(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance, both (C, D), of text embeddings (C, M, D) brought to unit norm.

    The mean is not normalised again. A single prompt has no variance: 0.
    """
    if embeddings.dim() != 3 or not embeddings.shape[1]:
        raise UserError(f"embeddings have the shape {tuple(embeddings.shape)}, expected (classes, prompts, dimensions)")
    units = F.normalize(widened(embeddings), dim=-1)
    mean = units.mean(1)
    squares = (units - mean[:, None]).square().sum(1)
    return mean, squares / max(embeddings.shape[1] - 1, 1)


def global_prototypes(
    local_prototypes: Tensor, noise: Tensor, spread: str = "biased", present: Tensor | None = None
) -> Tensor:
    """PRR's global prototypes (C, D): mean over sites + noise (C, D) * standard deviation over sites.

    Local prototypes (K, C, D); a class that a site lacks, by the mask `present` (K, C), is left out of both.
    `spread` is the deviation: "biased" (the paper), "clamped" (as released: unbiased, at least 1) or "none"
    (the mean alone). Sites that agree give their common prototypes, unless clamped.
    """
    check_choice("spread", spread, ("biased", "clamped", "none"))
    if present is None:
        present = local_prototypes.new_ones(local_prototypes.shape[:2], dtype=torch.bool)
    local_prototypes = widened(local_prototypes)
    held = present[..., None]
    sites = held.sum(0).to(local_prototypes.dtype)
    mean = local_prototypes.masked_fill(~held, 0.0).sum(0) / sites.clamp(min=1)
    if spread == "none":
        return mean
    check_shape("noise", noise.shape, local_prototypes.shape[1:])
    # A norm, not the root of a sum: where sites agree, its gradient is 0 and that of the root is not a number.
    gaps = (local_prototypes - mean).masked_fill(~held, 0.0).norm(dim=0)
    if spread == "biased":
        return mean + noise * (gaps / sites.clamp(min=1).sqrt())
    return mean + noise * (gaps / (sites - 1).clamp(min=1).sqrt()).clamp(min=1.0)


def orthogonal_frame(num_classes: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Random unit vectors (C, size), each at right angles to every other."""
    if num_classes > size:
        raise UserError(
            f"{num_classes} class vectors at equal angles need at least {num_classes} dimensions, not {size}: "
            "choose a net with more features, or project onto more"
        )
    columns = torch.randn(size, num_classes, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(columns)[0].T.float().contiguous()


def simplex_frame(num_classes: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Random unit vectors (C, size) as far apart as can be: a simplex, every cosine -1 / (C - 1).

    Also called a simplex equiangular tight frame (ETF). The vectors sum to zero.
    """
    if num_classes < 2:
        raise UserError(f"a simplex needs at least 2 classes, not {num_classes}")
    vectors = orthogonal_frame(num_classes, size, generator)
    return math.sqrt(num_classes / (num_classes - 1)) * (vectors - vectors.mean(0))
