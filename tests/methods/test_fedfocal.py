"""FedFocal's loss; with an exponent of 0 it is FedAvg bit for bit."""

from __future__ import annotations

import pytest
import torch

from clients import SHORT, new_client, noise_batch
from harness import all_state, assert_same_bits, events, run_tiny


@pytest.mark.parametrize("loss", ["ce", "balanced_softmax"])
def test_with_an_exponent_of_zero_it_is_fedavg_bit_for_bit(tmp_path, loss):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, f"train.loss='{loss}'")
    limit = run_tiny(tmp_path / "fedfocal", "fedfocal", *SHORT, "fedfocal.gamma=0", f"train.loss='{loss}'")
    assert_same_bits(all_state(plain), all_state(limit))


def test_method_and_loss_of_this_name_are_one(tmp_path):
    method = run_tiny(tmp_path / "method", "fedfocal", *SHORT)
    loss = run_tiny(tmp_path / "loss", "fedavg", *SHORT, "train.loss='focal'")
    assert_same_bits(all_state(method), all_state(loss))


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_an_image_counts_by_how_unsure_the_net_is_of_it(gamma):
    client, batch = new_client("fedfocal", f"fedfocal.gamma={gamma}"), noise_batch()
    out = client.outputs(batch)
    right = out.logits.softmax(1)[torch.arange(8), batch.label]
    expected = (-((1 - right) ** gamma) * right.log()).mean()
    torch.testing.assert_close(client.loss(batch, out), expected)


def test_the_supervised_loss_counts_only_in_the_limit(tmp_path):
    few = ("data.phantom.images=90", "train.rounds=1", "evaluation.trained=false")
    own, other = (
        run_tiny(tmp_path / name, "fedfocal", *few, f"train.loss='{name}'") for name in ("ce", "balanced_softmax")
    )
    assert_same_bits(all_state(own), all_state(other))
    assert any("train.loss" in text for text in events(other, "start")[0]["warnings"])
    limits = [
        run_tiny(tmp_path / f"limit {n}", "fedfocal", *few, "fedfocal.gamma=0", f"train.loss='{n}'")
        for n in ("ce", "focal")
    ]
    assert any(not torch.equal(a, b) for a, b in zip(*(all_state(limit).values() for limit in limits)))
    assert not any("train.loss" in text for text in events(limits[1], "start")[0]["warnings"])
