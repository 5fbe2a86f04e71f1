"""Every loss, forward and backward, keeps to what a captured CUDA graph allows: no value is read on the host."""

import pytest
import torch

from equipoise import losses
from equipoise.checks.host_reads import HostReads
from named_losses import LOSSES

LOGITS, FEATURES = torch.randn(6, 4), torch.randn(6, 8)
LABELS, COUNTS = torch.tensor([0, 1, 3, 3, 0, 1]), torch.tensor([5, 4, 0, 2])
PRESENT, PROTOTYPES = COUNTS > 0, torch.randn(4, 8)
IMAGES, CODES = torch.randn(6, 3, 4, 4), torch.randn(6, 5)

CASES = {
    **{name: (lambda z, loss=loss: loss(z, LABELS, COUNTS), LOGITS) for name, loss in LOSSES.items()},
    "difficulty": (
        lambda z: losses.logit_adjusted(z, LABELS, losses.difficulty_margins(COUNTS, torch.ones(4))),
        LOGITS,
    ),
    "class_loss_sums": (lambda z: losses.class_loss_sums(z, LABELS)[0].sum(), LOGITS),
    "restricted": (lambda z: losses.restricted_softmax(z, LABELS, PRESENT), LOGITS),
    "intra": (lambda z: losses.intra_client_contrastive(z.reshape(6, 2, 4), LABELS, COUNTS), FEATURES),
    "inter": (
        lambda z: losses.inter_client_contrastive(z.reshape(6, 2, 4), LABELS, PROTOTYPES[:, :4]),
        FEATURES,
    ),
    "moon": (lambda z: losses.model_contrastive(z, FEATURES + 1, FEATURES - 1), FEATURES),
    "fedproc": (lambda z: losses.prototype_contrastive(z, LABELS, PROTOTYPES, PRESENT), FEATURES),
    "npr": (
        lambda z: losses.subcluster_regularisation(z, LABELS, PROTOTYPES[:, None], present=PRESENT),
        FEATURES,
    ),
    "cpa": (
        lambda z: losses.conjoint_prototype_aligned(z, LABELS, COUNTS, PROTOTYPES, PROTOTYPES + 1),
        LOGITS,
    ),
    "fedproto": (lambda z: losses.prototype_distance(z, LABELS, PROTOTYPES, PRESENT), FEATURES),
    "concept": (lambda z: losses.concept_alignment(z, LABELS, PROTOTYPES, PROTOTYPES.square(), 5.0), FEATURES),
    "diversity": (lambda x: losses.diversity(CODES, x, LABELS, 4), IMAGES),
    "statistics": (
        lambda x: losses.norm_statistics_gap(
            [x.mean((0, 2, 3))], [x.var((0, 2, 3))], [torch.zeros(3)], [torch.ones(3)]
        ),
        IMAGES,
    ),
    "mutual": (lambda z: losses.mutual_kl(z, LOGITS.flip(0)), LOGITS),
    "not_true": (lambda z: losses.not_true_kl(z, LOGITS.flip(0), LABELS), LOGITS),
    "vacant": (lambda z: losses.vacant_kl(z, LOGITS.flip(0), torch.tensor([5, 4, 0, 0])), LOGITS),
    "suppression": (lambda z: losses.logit_suppression(z, LABELS, COUNTS), LOGITS),
    "rebalanced": (lambda z: losses.rebalanced_binary(z, LABELS, torch.ones(4), torch.ones(4)), LOGITS),
    "inherited": (lambda z: losses.inherited_knowledge(z, LOGITS.flip(0), COUNTS < 3), LOGITS),
    "entropy": (lambda z: losses.prediction_entropy(z, PRESENT).sum(), LOGITS),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_read_no_value_on_the_host(name):
    loss, argument = CASES[name]
    variable = argument.clone().requires_grad_()
    with HostReads() as host:
        loss(variable).backward()
    assert host.seen == []
    assert variable.grad.isfinite().all() and variable.grad.any()
