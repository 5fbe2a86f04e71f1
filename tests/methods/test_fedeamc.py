"""FedeAMC's balanced cross entropy: classes count alike, and with equal counts nothing changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, new_client, noise_batch
from harness import all_state, assert_same_bits, run_tiny


@pytest.mark.parametrize("loss", ["ce", "focal"])
def test_without_the_exponent_it_is_fedavg_bit_for_bit(tmp_path, loss):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, f"train.loss='{loss}'")
    limit = run_tiny(tmp_path / "fedeamc", "fedeamc", *SHORT, f"train.loss='{loss}'", "fedeamc.power=0")
    assert_same_bits(all_state(plain), all_state(limit))


def test_a_power_of_one_half_weighs_by_the_root_of_counts_and_one_on_average():
    client, batch = new_client("fedeamc", "fedeamc.power=0.5", class_counts=(4.0, 1.0, 1.0, 0.0)), noise_batch(6)
    batch.label = torch.tensor([0] * 4 + [1, 2])
    out = client.outputs(batch)
    weights = torch.tensor([0.5] * 4 + [1.0, 1.0])
    losses = F.cross_entropy(out.logits, batch.label, reduction="none")
    torch.testing.assert_close(client.loss(batch, out), (weights / weights.mean() * losses).mean())


def test_method_and_loss_of_this_name_are_one(tmp_path):
    method = run_tiny(tmp_path / "method", "fedeamc", *SHORT)
    loss = run_tiny(tmp_path / "loss", "fedavg", *SHORT, "train.loss='fedeamc'")
    assert_same_bits(all_state(method), all_state(loss))


def test_with_equal_counts_it_is_fedavgs_loss():
    client, batch = new_client("fedeamc", class_counts=(7.0, 7.0, 7.0, 7.0)), noise_batch()
    out = client.outputs(batch)
    torch.testing.assert_close(client.loss(batch, out), F.cross_entropy(out.logits, batch.label))


def test_over_a_sites_images_the_loss_is_the_mean_over_its_classes_of_their_mean_losses():
    client, batch = new_client("fedeamc", class_counts=(6.0, 3.0, 1.0, 0.0)), noise_batch(10)
    batch.label = torch.tensor([0] * 6 + [1] * 3 + [2])
    out = client.outputs(batch)
    losses = F.cross_entropy(out.logits, batch.label, reduction="none")
    by_class = torch.stack([losses[batch.label == label].mean() for label in range(3)])
    torch.testing.assert_close(client.loss(batch, out), by_class.mean())
