"""The losses, one family per file: pure functions of tensors that also run inside a captured CUDA graph."""

from equipoise.losses._shapes import by_place, membership, rows, widened, working_dtype
from equipoise.losses.balance import inherited_knowledge, prediction_entropy
from equipoise.losses.concept import concept_alignment, concept_logits, diversity
from equipoise.losses.contrastive import (
    inter_client_contrastive,
    intra_client_contrastive,
    model_contrastive,
    prototype_contrastive,
)
from equipoise.losses.distillation import mutual_kl, not_true_kl, vacant_kl
from equipoise.losses.norm_statistics import norm_statistics_gap
from equipoise.losses.prototype import (
    alignment_weights,
    conjoint_prototype_aligned,
    imbalance_ratios,
    prototype_distance,
    subcluster_regularisation,
    subcluster_scores,
)
from equipoise.losses.supervised import (
    balanced_softmax,
    calibrated_margins,
    class_balanced,
    class_loss_sums,
    cross_entropy,
    difficulty_margins,
    fedlc,
    focal,
    graded_factors,
    logit_adjusted,
    logit_suppression,
    rebalanced_binary,
    restricted_logits,
    restricted_softmax,
    soft_dice,
)

__all__ = [
    "alignment_weights",
    "balanced_softmax",
    "by_place",
    "calibrated_margins",
    "class_balanced",
    "class_loss_sums",
    "concept_alignment",
    "concept_logits",
    "conjoint_prototype_aligned",
    "cross_entropy",
    "difficulty_margins",
    "diversity",
    "fedlc",
    "focal",
    "graded_factors",
    "imbalance_ratios",
    "inherited_knowledge",
    "inter_client_contrastive",
    "intra_client_contrastive",
    "logit_adjusted",
    "logit_suppression",
    "membership",
    "model_contrastive",
    "mutual_kl",
    "norm_statistics_gap",
    "not_true_kl",
    "prediction_entropy",
    "prototype_contrastive",
    "prototype_distance",
    "rebalanced_binary",
    "restricted_logits",
    "restricted_softmax",
    "rows",
    "soft_dice",
    "subcluster_regularisation",
    "subcluster_scores",
    "vacant_kl",
    "widened",
    "working_dtype",
]
