"""BalanceFL: its limit, balanced draws, noise on rare classes' features, inheritance and smoothness."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from clients import new_client, noise_batch
from equipoise.contract.method import Batch
from equipoise.contract.protocol import Scan, Train
from equipoise.losses import inherited_knowledge, prediction_entropy
from equipoise.methods.balancefl import within_class_spread
from harness import all_state, assert_same_bits, run_tiny

OFF = {
    "balanced": "false",
    "feature_noise": "false",
    "present_only": "false",
    "inherit": "0",
    "smooth": "0",
}


def off_but(**on: str) -> tuple[str, ...]:
    """Settings in which only some parts of BalanceFL are on."""
    return tuple(f"balancefl.{name}={value}" for name, value in (OFF | on).items())


def test_with_everything_off_it_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg")
    limit = run_tiny(tmp_path / "balancefl", "balancefl", *off_but())
    assert_same_bits(all_state(plain), all_state(limit))


@pytest.mark.parametrize(
    "part",
    [{"balanced": "true"}, {"feature_noise": "true"}, {"present_only": "true"}, {"inherit": "1"}, {"smooth": "1"}],
)
def test_every_part_makes_a_difference(tmp_path, part):
    """Inheritance needs a site that lacks two classes."""
    few = ("data.phantom.missing=0.5", "data.phantom.images=90", "train.rounds=1", "evaluation.trained=false")
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *few)
    folder = run_tiny(tmp_path / "balancefl", "balancefl", *off_but(**part), *few)
    name = "server/model/body.0.weight"
    assert not torch.equal(all_state(plain)[name], all_state(folder)[name])


# ---- draws ------------------------------------------------------------------------------------------------


def test_classes_are_drawn_equally_often_whatever_their_numbers():
    client = new_client("balancefl")
    labels = torch.tensor([0] * 900 + [1] * 90 + [3] * 10)
    order = client.workplace.order(labels, torch.Generator().manual_seed(0))
    assert len(order) == len(labels)
    shares = labels[order].bincount(minlength=4) / len(order)
    torch.testing.assert_close(shares, torch.tensor([1, 1, 0, 1]) / 3, rtol=0, atol=0.05)
    rare = order[labels[order] == 3]
    assert len(rare.unique()) == 10  # every image of the rare class


def test_unbalanced_draws_see_every_image_once():
    client = new_client("balancefl", *off_but())
    order = client.workplace.order(torch.tensor([0] * 9 + [1]), torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(10))


# ---- noise on features ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 40], ids=["more images", "more features"])
def test_the_spread_is_the_mean_of_the_classes_covariances(size):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(17, size, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0] * 10 + [1] * 6 + [3])
    covariances = [np.cov(features[labels == c].numpy().T) for c in (0, 1)]
    expected = (10 * covariances[0] + 6 * covariances[1]) / 17  # the class with one image has none
    spread = within_class_spread(features, labels, 4)
    torch.testing.assert_close(spread.T @ spread, torch.from_numpy(expected))


def test_rare_classes_get_noise_that_spreads_like_features_and_the_largest_class_gets_none():
    client = new_client("balancefl", class_counts=(8.0, 4.0, 2.0, 0.0))
    client.spread.copy_(torch.diag(torch.linspace(0, 2, len(client.spread))))
    labels = torch.arange(3).repeat_interleave(4000)
    noise = client.feature_noise(labels, torch.Generator().manual_seed(0))
    rates = [(noise[labels == c].any(1)).float().mean().item() for c in range(3)]
    assert rates[0] == 0
    assert rates[1:] == pytest.approx([0.5, 0.75], abs=0.03)
    noisy = noise[noise.any(1)]
    torch.testing.assert_close(noisy.std(0), client.spread.diagonal(), rtol=0.08, atol=1e-6)


def test_before_training_a_site_learns_how_features_spread_and_remembers_the_received_model():
    client, batch = new_client("balancefl"), noise_batch(8)
    received = {name: tensor.clone() for name, tensor in client.net.state_dict().items()}
    action = client.train({})
    scan = next(action)
    assert isinstance(scan, Scan)
    assert_same_bits(client.teacher.state_dict(), received)
    client.workplace.set_mode(False)
    with torch.no_grad():
        seen = scan.function(batch)
        assert isinstance(action.send(seen), Train)
    expected = within_class_spread(client.net.features(batch.image).detach(), batch.label, 4)
    torch.testing.assert_close(client.spread.T @ client.spread, expected.T @ expected, rtol=1e-3, atol=1e-5)
    chunk = client.prepare(batch)
    torch.testing.assert_close(chunk["inherited"], client.net(batch.image))
    assert chunk["noise"].shape == (8, client.net.feature_size)


# ---- the loss ------------------------------------------------------------------------------------------------


def test_the_loss_is_the_sum_of_its_parts():
    client = new_client("balancefl", "balancefl.inherit=0.5", "balancefl.smooth=0.1", class_counts=(6.0, 3.0, 0.0, 0.0))
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(6) % 2
    logits, noisy, teacher = (torch.randn(6, 4, generator=generator) for _ in range(3))
    batch = Batch(label=labels, inherited=teacher)
    present = torch.tensor([True, True, False, False])
    expected = (
        F.cross_entropy(noisy[:, :2], labels)
        + 0.5 * inherited_knowledge(logits, teacher, ~present, 2.0)
        - 0.1 * prediction_entropy(logits, present).sum()
    )
    torch.testing.assert_close(client.loss(batch, SimpleNamespace(logits=logits, noisy_logits=noisy)), expected)


def test_classes_that_a_site_lacks_move_only_by_what_it_inherits():
    batch = noise_batch(6, classes=2)

    def head_gradient(inherit: str) -> torch.Tensor:
        client = new_client(
            "balancefl",
            *off_but(present_only="true", smooth="0.002", inherit=inherit),
            class_counts=(6.0, 3.0, 0.0, 0.0),
        )
        batch.inherited = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        return torch.autograd.grad(client.loss(batch, client.outputs(batch)), client.net.head.weight)[0]

    alone, heir = head_gradient("0"), head_gradient("1")
    assert not alone[2:].any() and alone[:2].any()
    assert heir[2:].any(dim=1).all()
    torch.testing.assert_close(heir[:2], alone[:2])
