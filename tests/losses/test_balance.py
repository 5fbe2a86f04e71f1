"""BalanceFL's terms: inherited knowledge of missing classes, and the entropy of predictions over present ones."""

import math

import pytest
import torch

from closeness import assert_close, gradient
from equipoise.losses import inherited_knowledge, prediction_entropy

MISSING = torch.tensor([False, True, False, True, True])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_inherited_knowledge_is_the_cross_entropy_among_the_missing_classes():
    logits, teacher = normal(6, 5), normal(6, 5, seed=1)
    chances = (teacher[:, MISSING] / 3).softmax(1)
    expected = -(chances * (logits[:, MISSING] / 3).log_softmax(1)).sum(1).mean()
    assert_close(inherited_knowledge(logits, teacher, MISSING, 3.0), expected, 1e-12)


def test_inherited_knowledge_moves_missing_classes_only_and_rests_where_model_and_teacher_agree():
    logits, teacher = normal(6, 5), normal(6, 5, seed=1)
    slope = gradient(lambda z: inherited_knowledge(z, teacher, MISSING), logits)
    assert not slope[:, ~MISSING].any() and slope[:, MISSING].all()
    assert gradient(lambda z: inherited_knowledge(z, teacher, MISSING), teacher).abs().max() < 1e-12


@pytest.mark.parametrize("count", [0, 1])
def test_with_fewer_than_two_missing_classes_there_is_nothing_to_inherit(count):
    missing = torch.arange(5) < count
    logits = normal(6, 5)
    assert inherited_knowledge(logits, normal(6, 5, seed=1), missing) == 0
    assert not gradient(lambda z: inherited_knowledge(z, normal(6, 5, seed=1), missing), logits).any()


def test_entropy_is_largest_for_equal_logits_and_zero_for_a_single_class():
    equal = prediction_entropy(torch.zeros(2, 5), ~MISSING)
    assert_close(equal, torch.full((2,), math.log(2)))
    assert not prediction_entropy(normal(4, 5), torch.arange(5) == 2).any()
    assert (prediction_entropy(normal(50, 5), ~MISSING) < math.log(2)).all()


def test_entropy_is_that_of_the_softmax_over_present_classes():
    logits = normal(6, 5)
    chances = logits[:, ~MISSING].softmax(1)
    assert_close(prediction_entropy(logits, ~MISSING), -(chances * chances.log()).sum(1), 1e-12)
    slope = gradient(lambda z: prediction_entropy(z, ~MISSING).sum(), logits)
    assert not slope[:, MISSING].any() and slope.isfinite().all()
