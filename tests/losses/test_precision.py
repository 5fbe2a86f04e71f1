"""Losses of half-precision values and of labels of any integer type are those of single precision."""

import pytest
import torch

from equipoise import losses
from named_losses import LOSSES


def random(*shape: int) -> torch.Tensor:
    """Noise that float16 represents exactly, so that precisions differ by arithmetic alone."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).half().float()


LOGITS, FEATURES, PROTOTYPES = random(6, 4), random(6, 8), random(4, 8)
PIXELS, PIXEL_LABELS = random(2, 4, 3, 3), torch.arange(18).reshape(2, 3, 3) % 4
LABELS, COUNTS = torch.tensor([0, 1, 3, 3, 0, 1]), torch.tensor([5, 4, 0, 2])
PRESENT, VARIANCE = COUNTS > 0, PROTOTYPES.square()
IMAGES, CODES = random(6, 3, 4, 4), random(6, 5)

#: {name: (function of the argument in some precision, of labels and of a cast to that precision; argument; labels)}
CASES = {
    **{name: (lambda z, y, cast, loss=loss: loss(z, y, COUNTS), LOGITS, LABELS) for name, loss in LOSSES.items()},
    **{
        f"{name}, pixels": (lambda z, y, cast, loss=loss: loss(z, y, COUNTS), PIXELS, PIXEL_LABELS)
        for name, loss in LOSSES.items()
        if name != "fedlc"  # a class that is absent here would be a label
    },
    "cross_entropy": (lambda z, y, cast: losses.cross_entropy(z, y), LOGITS, LABELS),
    "logit_adjusted": (
        lambda z, y, cast: losses.logit_adjusted(z, y, losses.difficulty_margins(COUNTS, cast(torch.ones(4)))),
        LOGITS,
        LABELS,
    ),
    "class_loss_sums": (lambda z, y, cast: losses.class_loss_sums(z, y)[0].sum(), LOGITS, LABELS),
    "focal, weighted": (lambda z, y, cast: losses.focal(z, y, 2.0, cast(torch.ones(4))), LOGITS, LABELS),
    "restricted_softmax": (lambda z, y, cast: losses.restricted_softmax(z, y, PRESENT), LOGITS, LABELS),
    "intra": (lambda z, y, cast: losses.intra_client_contrastive(unit(z), y, COUNTS), FEATURES, LABELS),
    "inter": (
        lambda z, y, cast: losses.inter_client_contrastive(unit(z), y, cast(PROTOTYPES[:, :4])),
        FEATURES,
        LABELS,
    ),
    "model_contrastive": (
        lambda z, y, cast: losses.model_contrastive(z, cast(FEATURES.flip(0)), cast(FEATURES.flip(1))),
        FEATURES,
        LABELS,
    ),
    "prototype_contrastive": (
        lambda z, y, cast: losses.prototype_contrastive(z, y, cast(PROTOTYPES), PRESENT),
        FEATURES,
        LABELS,
    ),
    "subclusters": (
        lambda z, y, cast: losses.subcluster_regularisation(z, y, cast(PROTOTYPES)[:, None], present=PRESENT),
        FEATURES,
        LABELS,
    ),
    "subclusters, all classes": (
        lambda z, y, cast: losses.subcluster_regularisation(z, y, cast(PROTOTYPES)[:, None]),
        FEATURES,
        LABELS,
    ),
    "conjoint": (
        lambda z, y, cast: losses.conjoint_prototype_aligned(z, y, COUNTS, cast(PROTOTYPES), cast(PROTOTYPES.flip(1))),
        LOGITS,
        LABELS,
    ),
    "prototype_distance": (
        lambda z, y, cast: losses.prototype_distance(z, y, cast(PROTOTYPES), PRESENT),
        FEATURES,
        LABELS,
    ),
    "concept_alignment": (
        lambda z, y, cast: losses.concept_alignment(z, y, cast(PROTOTYPES), cast(VARIANCE), 2.0),
        FEATURES,
        LABELS,
    ),
    "concept_logits": (
        lambda z, y, cast: losses.concept_logits(z, cast(PROTOTYPES), cast(VARIANCE), 2.0)[:, 0].sum(),
        FEATURES,
        LABELS,
    ),
    "diversity": (lambda x, y, cast: losses.diversity(cast(CODES), x, y, 4), IMAGES, LABELS),
    "statistics": (
        lambda x, y, cast: losses.norm_statistics_gap(
            [x.mean((0, 2, 3))], [x.var((0, 2, 3))], [cast(torch.zeros(3))], [cast(torch.ones(3))]
        ),
        IMAGES,
        LABELS,
    ),
    "not_true_kl": (lambda z, y, cast: losses.not_true_kl(z, cast(LOGITS.flip(0)), y), LOGITS, LABELS),
    "vacant_kl": (
        lambda z, y, cast: losses.vacant_kl(z, cast(LOGITS.flip(0)), torch.tensor([5, 4, 0, 0])),
        LOGITS,
        LABELS,
    ),
    "logit_suppression": (lambda z, y, cast: losses.logit_suppression(z, y, COUNTS), LOGITS, LABELS),
    "rebalanced_binary": (
        lambda z, y, cast: losses.rebalanced_binary(z, y, cast(torch.ones(4)), cast(torch.ones(4))),
        LOGITS,
        LABELS,
    ),
    "mutual_kl": (lambda z, y, cast: losses.mutual_kl(z, cast(LOGITS.flip(0))), LOGITS, LABELS),
    "inherited": (
        lambda z, y, cast: losses.inherited_knowledge(z, cast(LOGITS.flip(0)), COUNTS < 3),
        LOGITS,
        LABELS,
    ),
    "entropy": (lambda z, y, cast: losses.prediction_entropy(z, PRESENT).sum(), LOGITS, LABELS),
}


def unit(features: torch.Tensor) -> torch.Tensor:
    """Two views (B, 2, D / 2) of unit norm."""
    return torch.nn.functional.normalize(features.float(), dim=-1).to(features.dtype).reshape(6, 2, 4)


@pytest.mark.parametrize("labels_type", [torch.int32, torch.uint8], ids=["int32", "uint8"])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_and_short_labels_give_the_loss_of_single_precision(name, labels_type):
    loss, argument, labels = CASES[name]
    expected = argument.clone().requires_grad_()
    exact = loss(expected, labels, lambda tensor: tensor)
    exact.backward()
    half = argument.half().requires_grad_()
    rounded = loss(half, labels.to(labels_type), lambda tensor: tensor.half())
    rounded.backward()
    assert rounded.dtype == torch.float32, "sums of half-precision numbers are too coarse to add up"
    torch.testing.assert_close(rounded, exact, rtol=4e-3, atol=1e-3)
    torch.testing.assert_close(half.grad.float(), expected.grad, rtol=2e-2, atol=4e-3)
