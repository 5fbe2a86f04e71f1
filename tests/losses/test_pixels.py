"""Losses of pixels: each is the loss of as many samples, and has its limits."""

import pytest
import torch
from torch.nn import functional as F

from equipoise.losses import (
    balanced_softmax,
    by_place,
    conjoint_prototype_aligned,
    cross_entropy,
    fedlc,
    focal,
    logit_suppression,
    not_true_kl,
    soft_dice,
    vacant_kl,
)

RANDOM = torch.Generator().manual_seed(0)
LOGITS, TEACHER = (torch.randn(2, 3, 4, 6, generator=RANDOM) for _ in range(2))
MASKS = torch.randint(3, (2, 4, 6), dtype=torch.uint8, generator=RANDOM)
COUNTS = torch.tensor([900.0, 90.0, 10.0])


def as_samples(maps):
    return maps.movedim(1, -1).flatten(0, -2) if maps.dim() == 4 else maps.flatten()


@pytest.mark.parametrize(
    "loss",
    [
        cross_entropy,
        lambda z, y: balanced_softmax(z, y, COUNTS),
        lambda z, y: conjoint_prototype_aligned(z, y, COUNTS),
        lambda z, y: fedlc(z, y, COUNTS),
        focal,
        lambda z, y: logit_suppression(z, y, COUNTS),
        lambda z, y: not_true_kl(z, TEACHER if z.dim() == 4 else as_samples(TEACHER), y),
        lambda z, y: vacant_kl(z, TEACHER if z.dim() == 4 else as_samples(TEACHER), torch.tensor([5.0, 0, 0])),
    ],
    ids=["ce", "balanced softmax", "cpa", "fedlc", "focal", "suppression", "not true", "vacant"],
)
def test_a_loss_of_pixels_is_that_of_as_many_samples(loss):
    assert loss(LOGITS, MASKS) == pytest.approx(float(loss(as_samples(LOGITS), as_samples(MASKS))), rel=1e-5)


@pytest.mark.parametrize("loss", [balanced_softmax, conjoint_prototype_aligned])
def test_with_equal_counts_it_is_cross_entropy(loss):
    plain = F.cross_entropy(LOGITS, MASKS.long())
    assert loss(LOGITS, MASKS, torch.full((3,), 7.0)) == pytest.approx(float(plain), abs=1e-4)


def test_soft_dice_is_0_for_sure_and_right_logits_and_near_1_for_wrong_ones():
    right = F.one_hot(MASKS.long(), 3).movedim(-1, 1) * 100.0
    assert soft_dice(right, MASKS) == pytest.approx(0, abs=1e-6)
    assert soft_dice(right.roll(1, dims=1), MASKS) > 0.8


def test_soft_dice_of_one_structure_is_what_its_formula_says():
    logits = torch.tensor([0.0, 0.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 2)
    masks = torch.tensor([[[1, 0], [0, 0]]])
    # Chances of one half everywhere: 2 * 0.5 + 1 over 2 + 1 + 1.
    assert soft_dice(logits, masks) == pytest.approx(1 - 2 / 4)


def test_a_structure_that_is_neither_there_nor_predicted_costs_nothing():
    logits = torch.tensor([50.0, -50.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 2)
    assert soft_dice(logits, torch.zeros(1, 2, 2)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("side", [1, 2])
def test_features_of_a_place_count_for_all_its_pixels(side):
    features = torch.randn(2, 5, 4 // side, 6 // side, generator=RANDOM)
    rows, members = by_place(features, MASKS, 3)
    enlarged = features.repeat_interleave(side, 2).repeat_interleave(side, 3)
    for label in range(3):
        expected = as_samples(enlarged)[as_samples(MASKS) == label].sum(0)
        torch.testing.assert_close(members.T[label] @ rows, expected)
    assert members.sum() == MASKS.numel()
