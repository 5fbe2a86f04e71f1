"""The supervised losses: golden numbers, limit cases, absent classes, dense logits, symmetry between classes."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from closeness import assert_close, assert_golden, gradient
from equipoise.core.errors import UserError
from equipoise.engine.runs import make_config
from equipoise.losses import (
    balanced_softmax,
    class_balanced,
    class_loss_sums,
    cross_entropy,
    difficulty_margins,
    fedlc,
    focal,
    logit_adjusted,
    restricted_softmax,
)
from named_losses import LOSSES

COUNTS = torch.tensor([40, 25, 20, 15])
WITH_ABSENT = torch.tensor([40, 25, 0, 15])
LABELS = torch.tensor([0, 1, 3, 3, 0, 1, 0])


def some_logits(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_balanced_softmax_has_the_golden_value_and_gradient(golden):
    case = golden("fednpr/balanced_softmax")
    labels, counts = case["labels"], case["class_counts"]
    assert_golden(lambda z: balanced_softmax(z, labels, counts), case["logits"], case["loss"], case["grad_logits"])
    one_by_one = [balanced_softmax(z[None], y[None], counts) for z, y in zip(case["logits"], labels)]
    assert_close(torch.stack(one_by_one), case["loss_per_sample"])


@pytest.mark.parametrize("name", ["fediic/dala", "fediic/dala_missing_class"])
def test_difficulty_margins_have_the_golden_values_and_gradient(golden, name):
    case = golden(name)
    margins = difficulty_margins(case["class_counts"], case["class_loss"], exponent=float(case["d"]))
    assert_close(margins, case["margin_added"])
    assert_golden(
        lambda z: logit_adjusted(z, case["labels"], margins), case["logits"], case["loss"], case["grad_logits"]
    )


def test_class_loss_sums_add_up_to_the_golden_difficulty(golden):
    case = golden("fediic/class_loss")
    sums, counts = zip(*map(class_loss_sums, case["logits"], case["labels"]))
    assert_close(torch.stack(sums), case["per_client_sum"])
    assert torch.equal(torch.stack(counts), case["class_counts"])
    assert_close(sum(sums) / (1e-5 + sum(counts)), case["global_mean"])


@pytest.mark.parametrize("name", ["balanced_softmax", "fedeamc", "fedlc"])
def test_equal_counts_give_plain_cross_entropy(name):
    logits, labels = some_logits(7, 4), LABELS
    assert_close(LOSSES[name](logits, labels, torch.full((4,), 9)), cross_entropy(logits, labels), 1e-8)


def test_equal_counts_and_losses_leave_the_softmax_unchanged():
    margins = difficulty_margins(torch.full((4,), 25), torch.full((4,), 0.7, dtype=torch.float64))
    logits = some_logits(7, 4)
    assert_close((logits + margins).softmax(1), logits.softmax(1), 1e-12)


def test_harder_and_rarer_classes_get_lower_margins():
    rarer = difficulty_margins(COUNTS, torch.ones(4))
    harder = difficulty_margins(torch.full((4,), 25), torch.tensor([0.1, 0.5, 1.0, 3.0]))
    assert (rarer.diff() < 0).all() and (harder.diff() < 0).all()


def test_focal_loss_with_gamma_zero_is_cross_entropy():
    logits = some_logits(7, 4)
    assert_close(focal(logits, LABELS, gamma=0.0), cross_entropy(logits, LABELS), 1e-12)


def test_focal_loss_follows_its_formula_and_weighs_classes_by_alpha():
    logits, alpha = some_logits(7, 4), torch.tensor([0.1, 1.0, 2.0, 3.0])
    own = logits.softmax(1)[range(7), LABELS]
    expected = (alpha[LABELS] * (1 - own) ** 1.5 * -own.log()).mean()
    assert_close(focal(logits, LABELS, gamma=1.5, alpha=alpha), expected, 1e-7)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_loss_has_no_gradient_at_certainty(gamma):
    certain = torch.tensor([[200.0, 0.0, 0.0]])
    assert not gradient(lambda z: focal(z, torch.tensor([0]), gamma), certain).any()


def test_class_weights_give_every_class_present_the_same_say():
    labels = torch.arange(4).repeat_interleave(WITH_ABSENT)
    logits = some_logits(len(labels), 4)
    losses = F.cross_entropy(logits, labels, reduction="none")
    means = torch.stack([losses[labels == label].mean() for label in (0, 1, 3)])
    assert_close(class_balanced(logits, labels, WITH_ABSENT), means.mean(), 1e-12)


def test_restricted_softmax_with_alpha_one_is_cross_entropy():
    logits, present = some_logits(7, 4), WITH_ABSENT > 0
    assert_close(restricted_softmax(logits, LABELS, present, alpha=1.0), cross_entropy(logits, LABELS), 1e-12)


def test_restricted_softmax_with_alpha_zero_leaves_missing_classes_alone():
    slope = gradient(lambda z: restricted_softmax(z, LABELS, WITH_ABSENT > 0, alpha=0.0), some_logits(7, 4))
    assert (slope[:, 2] == 0).all() and (slope[:, [0, 1, 3]] != 0).all()


def test_restricted_softmax_scales_the_logits_of_missing_classes():
    logits = some_logits(7, 4)
    scaled = logits * torch.tensor([1.0, 1.0, 0.5, 1.0])
    assert_close(restricted_softmax(logits, LABELS, WITH_ABSENT > 0), cross_entropy(scaled, LABELS), 1e-12)


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_fedlc_is_cross_entropy_of_calibrated_logits_of_the_classes_present(tau):
    logits, present = some_logits(7, 4), [0, 1, 3]
    calibrated = (logits - tau * WITH_ABSENT.double() ** -0.25)[:, present]
    renumbered = torch.tensor([0, 1, 2, 2, 0, 1, 0])
    assert_close(fedlc(logits, LABELS, WITH_ABSENT, tau), cross_entropy(calibrated, renumbered), 1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [WITH_ABSENT, WITH_ABSENT.float(), WITH_ABSENT.double()])
def test_losses_keep_the_logits_type_and_bear_absent_classes(name, dtype, counts):
    logits = some_logits(1, 4, dtype=dtype)
    loss = LOSSES[name](logits, torch.tensor([3]), counts)
    assert loss.dtype == dtype and loss.shape == () and loss.isfinite()
    assert gradient(lambda z: LOSSES[name](z, torch.tensor([3]), counts), logits).isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_dense_logits_count_every_pixel_as_a_sample(name):
    logits, labels = some_logits(2, 4, 3, 5), torch.randint(4, (2, 3, 5), generator=torch.Generator())
    pixels = logits.permute(0, 2, 3, 1).reshape(-1, 4)
    loss = LOSSES[name]
    assert_close(loss(logits, labels, COUNTS), loss(pixels, labels.flatten(), COUNTS), 1e-12)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(4)), seed=st.integers(0, 1000))
def test_losses_do_not_depend_on_the_numbering_of_classes(name, order, seed):
    logits, order = some_logits(7, 4, seed=seed), torch.tensor(order)
    renumbered = order.argsort()[LABELS]
    loss = LOSSES[name]
    assert_close(loss(logits[:, order], renumbered, COUNTS[order]), loss(logits, LABELS, COUNTS), 1e-12)


def test_a_site_without_any_sample_has_finite_frequencies():
    loss = balanced_softmax(torch.zeros(1, 4), torch.tensor([0]), torch.zeros(4))
    assert_close(loss, math.log(4))


@pytest.mark.parametrize("loss", [balanced_softmax, fedlc, logit_adjusted, restricted_softmax])
def test_values_for_other_classes_than_those_of_the_logits_are_refused(loss):
    for values in (torch.ones(1), torch.ones(3)):
        with pytest.raises(UserError, match=r"expected \(4,\)"):
            loss(some_logits(7, 4), LABELS, values)


def test_an_absent_class_is_out_whatever_its_loss():
    margins = difficulty_margins(torch.tensor([5, 0, 2]), torch.tensor([1.0, math.nan, 1.0]))
    assert margins[1] == -math.inf and margins.isfinite().sum() == 2


def test_class_loss_sums_count_every_pixel_as_a_sample():
    logits, labels = some_logits(2, 4, 3, 5), torch.arange(30).reshape(2, 3, 5) % 4
    flat = class_loss_sums(logits.movedim(1, -1).reshape(-1, 4), labels.flatten())
    for dense, plain in zip(class_loss_sums(logits, labels), flat):
        assert_close(dense, plain, 1e-12)


def test_an_unknown_loss_is_refused_with_the_names_of_the_known():
    with pytest.raises(UserError, match=r"'hinge'.*ce.*balanced_softmax.*fedeamc.*focal.*fedlc"):
        make_config(None, ["train.loss=hinge"])
    with pytest.raises(UserError, match=r"'focl'; did you mean 'focal'"):
        make_config(None, ["train.loss=focl"])


@pytest.mark.parametrize("name", LOSSES)
def test_a_config_can_name_each_of_them(name):
    assert make_config(None, [f"train.loss={name}"]).train.loss == name
