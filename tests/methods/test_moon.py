"""MOON's contrast between three models; without it, it is FedAvg bit for bit, projection and all."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, copied, new_client, new_server, noise_batch
from equipoise.contract.method import Batch, Client
from equipoise.losses import model_contrastive
from harness import all_state, assert_same_bits, run_tiny

ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")


def prepared(client: Client, batch: Batch) -> Batch:
    """The batch with what `prepare` adds, as the loop makes it."""
    with torch.no_grad():
        return Batch(**vars(batch), **client.prepare(batch))


def experienced(*settings: str) -> Client:
    """A client in its second round: global and previous model differ."""
    client = new_client("moon", *settings)
    draws = torch.Generator().manual_seed(1)
    previous = {
        name: t + 0.3 * torch.randn(t.shape, generator=draws) if t.is_floating_point() and "running" not in name else t
        for name, t in copied(client.sides["model-contrast"].previous.state_dict()).items()
    }
    kept = {f"previous/{name}": t for name, t in previous.items()} | {"trained_before/": torch.tensor(True)}
    client.workplace.begin({"model": copied(client.net.state_dict())}, kept)
    client.workplace.phases["main"].optimiser.lr.fill_(0.02)
    return client


# ---- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", [(), ADAM], ids=["sgd", "adam"])
def test_without_the_contrast_it_is_fedavg_bit_for_bit(tmp_path, optimiser):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, *optimiser)
    limit = run_tiny(tmp_path / "moon", "moon", *SHORT, "moon.mu=0", "moon.projection=256", *optimiser)
    assert_same_bits(all_state(plain), all_state(limit))


def test_in_a_sites_first_round_the_contrast_has_no_gradient():
    client = new_client("moon", "moon.mu=10")
    next(client.train({}))
    batch = prepared(client, noise_batch())
    out, parameters = client.outputs(batch), list(client.net.parameters())
    loss, plain = client.loss(batch, out), F.cross_entropy(out.logits, batch.label)
    torch.testing.assert_close(loss, plain + 10 * math.log(2))
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(plain, parameters)):
        torch.testing.assert_close(one, other)


# ---- the contrast ------------------------------------------------------------------------------------


def test_the_loss_adds_mu_times_the_contrast_between_the_three_models():
    client = experienced("moon.mu=3", "moon.temperature=0.2")
    next(client.train({}))
    client.workplace.set_mode(True)
    with torch.no_grad():
        client.net.head.bias.add_(1.0)
        for parameter in client.net.body.parameters():
            parameter.mul_(1.1)
    batch = prepared(client, noise_batch())
    out = client.outputs(batch)
    frozen = client.sides["model-contrast"]
    frozen.received.eval()
    frozen.previous.eval()
    near = F.cosine_similarity(out.features, frozen.received.features(batch.image)) / 0.2
    far = F.cosine_similarity(out.features, frozen.previous.features(batch.image)) / 0.2
    contrast = -(near.exp() / (near.exp() + far.exp())).log().mean()
    expected = F.cross_entropy(out.logits, batch.label) + 3 * contrast
    torch.testing.assert_close(client.loss(batch, out), expected, rtol=1e-4, atol=1e-5)


def test_training_brings_features_to_the_global_model_and_away_from_the_previous_one():
    client = experienced("moon.mu=10")
    next(client.train({}))
    with torch.no_grad():
        client.net.load_state_dict(client.sides["model-contrast"].previous.state_dict())
    batch = prepared(client, noise_batch(16))

    def contrast() -> float:
        features = client.outputs(batch).features
        return model_contrastive(features, batch.received_features, batch.previous_features).item()

    before = contrast()
    for _ in range(5):
        client.step([batch], client.workplace.phases["main"])
    assert contrast() < before - 0.05


def test_the_frozen_models_are_the_received_one_and_the_one_that_was_sent_last():
    client = experienced()
    received = copied(client.net.state_dict())
    action = client.train({})
    next(action)
    client.workplace.set_mode(True)
    client.step([prepared(client, noise_batch())], client.workplace.phases["main"])
    frozen = client.sides["model-contrast"]
    assert_same_bits(copied(frozen.received.state_dict()), received)
    with pytest.raises(StopIteration) as stop:
        next(action)
    assert_same_bits(copied(frozen.previous.state_dict()), copied(stop.value.value["model"]))
    assert frozen.trained_before


# ---- the projection ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("projection", "size"), [(256, 256), (0, 128)])
def test_features_are_projected_as_asked_on_both_sides_of_the_wall(projection, size):
    setting = f"moon.projection={projection}"
    client, server = new_client("moon", setting), new_server("moon", setting)
    assert client.outputs(noise_batch()).features.shape == (8, size)
    assert_same_bits(copied(client.new_net().state_dict()), server.state.model)


def test_a_projection_leaves_the_body_at_the_same_first_weights():
    plain, projected = new_server("fedavg").new_net().body, new_server("moon").new_net().body[0]
    assert_same_bits(copied(plain.state_dict()), copied(projected.state_dict()))
