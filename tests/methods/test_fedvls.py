"""FedVLS's two terms beside a calibrated loss; without all three it is FedAvg bit for bit."""

from __future__ import annotations

import math

import torch

from clients import SHORT
from equipoise.losses import logit_suppression, vacant_kl
from harness import all_state, assert_same_bits, run_tiny

STUDENT, TEACHER = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20.0).reshape(5, 4).sin()
LABELS, COUNTS = torch.tensor([0, 0, 1, 0, 1]), torch.tensor([3.0, 2.0, 0.0, 0.0])
NO_TERMS = ("fedvls.distillation=0", "fedvls.suppression=0")


def test_without_its_three_ideas_it_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT)
    limit = run_tiny(tmp_path / "fedvls", "fedvls", *SHORT, *NO_TERMS, "fedvls.calibrated=false")
    assert_same_bits(all_state(plain), all_state(limit))


def test_without_its_terms_it_is_balanced_softmax_bit_for_bit(tmp_path):
    balanced = run_tiny(tmp_path / "balanced", "fedavg", *SHORT, "train.loss='balanced_softmax'")
    limit = run_tiny(tmp_path / "fedvls", "fedvls", *SHORT, *NO_TERMS)
    assert_same_bits(all_state(balanced), all_state(limit))


def test_the_distillation_is_the_divergence_over_the_absent_classes():
    q_s, q_t = (z.double()[:, 2:].softmax(1) for z in (STUDENT, TEACHER))
    expected = (q_t * (q_t / q_s).log()).sum(1).mean()
    torch.testing.assert_close(vacant_kl(STUDENT.double(), TEACHER.double(), COUNTS), expected)


def test_with_all_classes_there_is_nothing_to_distil():
    for counts in ((1, 2, 3, 4), (1, 2, 3, 0)):
        assert vacant_kl(STUDENT, TEACHER, torch.tensor(counts)) == 0


def test_the_suppression_follows_its_formula():
    shares, total = COUNTS.double() / 5, 0.0
    for c in (0, 1):  # absent classes weigh nothing
        terms = [
            0.0 if label == c else float(z[c]) - math.log(float(shares[c]) + 1e-9) - math.log(4)
            for z, label in zip(STUDENT, LABELS)
        ]
        total += float(shares[c]) * math.log(sum(map(math.exp, terms)) / 5)
    torch.testing.assert_close(
        logit_suppression(STUDENT.double(), LABELS, COUNTS), torch.tensor(total, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_the_suppression_pushes_only_wrong_logits_of_present_classes():
    logits = STUDENT.clone().requires_grad_()
    logit_suppression(logits, LABELS, COUNTS).backward()
    wrong = torch.tensor([[label != c and c < 2 for c in range(4)] for label in LABELS])
    assert (logits.grad[wrong] > 0).all() and not logits.grad[~wrong].any()
