"""Fed-GraB: weighted binary cross entropy, and a controller that draws both sums of gradients together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from clients import new_client
from equipoise.components.gradient_balance import rare_classes, weight_of
from equipoise.contract.method import Batch

WITH = ("components=['gradient-balance']", "gradient-balance.classes=all")
LOGITS = torch.tensor([[1.0, -1.0, 0.5, 0.0], [0.2, 0.3, -0.4, 1.0]])
LABELS = torch.tensor([0, 3])


def side(*settings):
    return new_client("fedavg", *WITH, *settings).sides["gradient-balance"]


def test_a_controller_at_rest_weighs_1_and_weights_stay_between_0_and_10():
    assert weight_of(torch.zeros(1)).item() == pytest.approx(1.0)
    low, high = weight_of(torch.tensor([-100.0, 100.0])).tolist()
    assert 0 < low < 0.01 and 9 < high < 10


def test_at_rest_the_loss_is_binary_cross_entropy_summed_over_classes():
    target = torch.nn.functional.one_hot(LABELS, 4).float()
    plain = torch.nn.functional.binary_cross_entropy_with_logits(LOGITS, target, reduction="sum") / 2
    torch.testing.assert_close(side().supervised(LOGITS, LABELS), plain)


def test_a_weight_scales_the_gradient_of_own_images_alone():
    balanced = side()
    balanced.output.fill_(20.0)
    logits = LOGITS.clone().requires_grad_()
    (slope,) = torch.autograd.grad(balanced.supervised(logits, LABELS), logits)
    target = torch.nn.functional.one_hot(LABELS, 4).float()
    weight = torch.where(target > 0, weight_of(torch.tensor(20.0)), 1.0)
    torch.testing.assert_close(slope, weight * (LOGITS.sigmoid() - target) / 2)


def test_the_controller_follows_the_incremental_pid():
    balanced = side("gradient-balance.kp=2", "gradient-balance.ki=0.5", "gradient-balance.kd=0.25")
    errors, output, difference = [torch.zeros(4), torch.zeros(4)], torch.zeros(4), torch.zeros(4)
    target = torch.nn.functional.one_hot(LABELS, 4).float()
    for _ in range(3):
        sizes = (LOGITS.sigmoid() - target).abs() / 2
        difference = difference + (target * sizes).sum(0) * weight_of(output) - ((1 - target) * sizes).sum(0)
        error = -difference
        output = output + 2 * (error - errors[-1]) + 0.5 * error + 0.25 * (error - 2 * errors[-1] + errors[-2])
        errors.append(error)
        balanced.seen(Batch(label=LABELS), SimpleNamespace(logits=LOGITS))
    torch.testing.assert_close(balanced.output, output.clamp(-100, 100))


def test_classes_with_few_images_are_drawn_up():
    """A class without own gradients gets a growing weight, one without others' a falling one."""
    balanced = side()
    for _ in range(5):
        balanced.seen(Batch(label=torch.tensor([0, 0])), SimpleNamespace(logits=torch.tensor([[-2.0, 0, 0, 0]] * 2)))
    weights = balanced.weights()
    assert weights[0] < 1 < weights[1]


def test_the_classes_with_the_shortest_rows_are_rare():
    head = torch.tensor([[3.0, 0], [0.1, 0], [2.0, 0], [0, 0.5]])
    assert rare_classes(head, 0.5).tolist() == [False, True, False, True]


def test_classes_without_a_controller_keep_the_plain_loss():
    balanced = side()
    balanced.rare.copy_(torch.tensor([True, False, True, True]))
    for _ in range(3):
        balanced.seen(Batch(label=LABELS), SimpleNamespace(logits=LOGITS))
    assert balanced.output[1] == 0 and balanced.weights()[1] == 1
