"""FedNTD's distillation over wrong classes; without it it is FedAvg bit for bit."""

from __future__ import annotations

import torch

from clients import SHORT, new_client, noise_batch
from equipoise.contract.method import Batch
from equipoise.losses import not_true_kl
from harness import all_state, assert_same_bits, run_tiny

STUDENT, TEACHER = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20.0).reshape(5, 4).sin()
LABELS = torch.tensor([0, 3, 1, 2, 2])


def test_without_distillation_it_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT)
    limit = run_tiny(tmp_path / "fedntd", "fedntd", *SHORT, "fedntd.beta=0")
    assert_same_bits(all_state(plain), all_state(limit))


def test_the_distillation_is_the_divergence_over_the_other_classes():
    """tau^2 sum_{c != y} q_t log(q_t / q_s), each q a softmax of z / tau without the label."""
    tau, found = 2.0, []
    for student, teacher, label in zip(STUDENT.double(), TEACHER.double(), LABELS):
        others = [c for c in range(4) if c != label]
        q_s, q_t = ((z[others] / tau).softmax(0) for z in (student, teacher))
        found.append(tau**2 * (q_t * (q_t / q_s).log()).sum())
    torch.testing.assert_close(not_true_kl(STUDENT.double(), TEACHER.double(), LABELS, tau), torch.stack(found).mean())


def test_the_labels_own_logit_plays_no_part():
    moved = STUDENT + 3 * torch.nn.functional.one_hot(LABELS, 4)
    torch.testing.assert_close(not_true_kl(moved, TEACHER, LABELS), not_true_kl(STUDENT, TEACHER, LABELS))
    assert not_true_kl(TEACHER, TEACHER, LABELS) == 0


def test_a_site_is_held_to_the_net_that_it_received():
    client = new_client("fedntd", "fedntd.beta=2.5")
    side = client.sides["not-true"]
    list(side.begin({}))
    batch = noise_batch()
    client.workplace.set_mode(False)
    with torch.no_grad():
        batch = Batch(**vars(batch), **client.prepare(batch))
        out = client.outputs(batch)
        torch.testing.assert_close(side.taught(batch), out.logits)
        plain = client.supervised(out.logits, batch.label)
        torch.testing.assert_close(client.loss(batch, out), plain)  # nothing to keep yet
        client.net.head.weight.neg_()
        out = client.outputs(batch)
        expected = client.supervised(out.logits, batch.label) + 2.5 * not_true_kl(
            out.logits, side.taught(batch), batch.label
        )
        torch.testing.assert_close(client.loss(batch, out), expected)
