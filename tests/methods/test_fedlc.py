"""FedLC's pairwise margins; without them it is FedAvg bit for bit."""

from __future__ import annotations

import torch

from clients import SHORT, new_client, noise_batch
from harness import all_state, assert_same_bits, events, run_tiny


def test_without_margins_it_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT)
    limit = run_tiny(tmp_path / "fedlc", "fedlc", *SHORT, "fedlc.tau=0")
    assert_same_bits(all_state(plain), all_state(limit))


def test_method_and_loss_of_this_name_are_one(tmp_path):
    method = run_tiny(tmp_path / "method", "fedlc", *SHORT)
    loss = run_tiny(tmp_path / "loss", "fedavg", *SHORT, "train.loss='fedlc'")
    assert_same_bits(all_state(method), all_state(loss))


def test_each_pair_of_classes_has_its_margin_from_the_sites_counts():
    """log(1 + sum_j exp(z_j - z_y + tau (n_y^-1/4 - n_j^-1/4))) over the classes that the site has."""
    counts = torch.tensor([6.0, 3.0, 1.0])
    client, batch = new_client("fedlc", "fedlc.tau=0.7"), noise_batch()
    out = client.outputs(batch)
    losses = []
    for logits, label in zip(out.logits.double(), batch.label):
        margins = 0.7 * (counts[label] ** -0.25 - counts**-0.25)
        others = [(logits[j] - logits[label] + margins[j]).exp() for j in range(3) if j != label]
        losses.append((1 + sum(others)).log())
    torch.testing.assert_close(client.loss(batch, out).double(), torch.stack(losses).mean())


def test_the_rarer_a_class_the_harder_its_images_push():
    """Of two classes with equal logits, the margin makes the rare one's images lose more."""
    client = new_client("fedlc", class_counts=(16.0, 1.0, 0.0, 0.0))
    logits = torch.zeros(1, 4)
    common, rare = (client.supervised(logits, torch.tensor([label])) for label in (0, 1))
    assert rare > common + 0.4


def test_a_class_that_the_site_lacks_gets_no_gradient():
    client, batch = new_client("fedlc"), noise_batch()
    (gradient,) = torch.autograd.grad(client.loss(batch, client.outputs(batch)), client.net.head.weight)
    assert not gradient[3].any() and gradient[:3].any(dim=1).all()


def test_the_supervised_loss_counts_only_in_the_limit(tmp_path):
    few = ("data.phantom.images=90", "train.rounds=1", "evaluation.trained=false")
    own, other = (
        run_tiny(tmp_path / name, "fedlc", *few, f"train.loss='{name}'") for name in ("ce", "balanced_softmax")
    )
    assert_same_bits(all_state(own), all_state(other))
    assert any("train.loss" in text for text in events(other, "start")[0]["warnings"])
    limits = [
        run_tiny(tmp_path / f"limit {n}", "fedlc", *few, "fedlc.tau=0", f"train.loss='{n}'") for n in ("ce", "focal")
    ]
    assert any(not torch.equal(a, b) for a, b in zip(*(all_state(limit).values() for limit in limits)))
    assert not any("train.loss" in text for text in events(limits[1], "start")[0]["warnings"])
