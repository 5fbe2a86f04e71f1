"""FedRoD's generic branch is FedAvg under the balanced loss, bit for bit; its personal head adds to it and stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import changed, copied, kept_of, new_client, noise_batch
from harness import assert_same_bits, events, run_tiny, server_state

ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")


@pytest.mark.parametrize("optimiser", [(), ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(("gamma", "loss"), [(1, "balanced_softmax"), (0, "ce")])
def test_the_generic_branch_is_fedavg_under_its_loss(tmp_path, gamma, loss, optimiser):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", f"train.loss='{loss}'", *optimiser)
    limit = run_tiny(tmp_path / "fedrod", "fedrod", f"fedrod.gamma={gamma}", *optimiser)
    assert_same_bits(server_state(plain), server_state(limit))


def test_the_personal_loss_moves_the_personal_head_alone():
    client = new_client("fedrod")
    batch = noise_batch()
    out = client.outputs(batch)
    parameters = [*client.net.parameters(), *client.personal_head.parameters()]
    personal = F.cross_entropy(out.personal_logits, batch.label)
    reached = torch.autograd.grad(personal, parameters, allow_unused=True)
    assert [g is not None for g in reached] == [False] * (len(parameters) - 2) + [True, True]
    generic = client.loss(batch, out) - personal
    reached = torch.autograd.grad(generic, list(client.personal_head.parameters()), allow_unused=True)
    assert reached == (None, None) or not any(g.any() for g in reached)


def test_at_first_the_personal_model_is_the_generic_one_and_then_their_sum():
    client = new_client("fedrod")
    batch = noise_batch()
    client.set_mode(False)
    assert torch.equal(client.predict("personal", batch), client.predict("global", batch))
    with torch.no_grad():
        client.personal_head.weight.normal_()
        features = client.net.features(batch.image)
        expected = client.net.head(features) + features @ client.personal_head.weight.T
    torch.testing.assert_close(client.predict("personal", batch), expected)


def test_gamma_is_the_exponent_of_the_class_counts():
    client = new_client("fedrod", "fedrod.gamma=0.5", class_counts=(16.0, 4.0, 1.0, 4.0))
    batch = noise_batch()
    out = client.outputs(batch)
    shifted = out.logits + torch.tensor([4.0, 2.0, 1.0, 2.0]).log()
    expected = F.cross_entropy(shifted, batch.label) + F.cross_entropy(out.personal_logits, batch.label)
    torch.testing.assert_close(client.loss(batch, out), expected)


def test_the_personal_head_follows_the_site_while_the_generic_one_is_balanced():
    """Labels alone, no signal: the personal model learns that class 0 is frequent, the generic one does not."""
    client = new_client("fedrod", "train.optimiser.lr=0.1", class_counts=(14.0, 1.0, 1.0, 0.0))
    batch = noise_batch(16)
    batch.label = torch.tensor([1, 2] + [0] * 14)
    batch.image = torch.ones_like(batch.image)
    for _ in range(60):
        client.step([batch], client.phases["main"])
    client.set_mode(False)
    generic, personal = (client.predict(view, batch).softmax(1)[0, :3] for view in ("global", "personal"))
    torch.testing.assert_close(generic, torch.full((3,), 1 / 3), atol=0.05, rtol=0)
    torch.testing.assert_close(personal, torch.tensor([14.0, 1.0, 1.0]) / 16, atol=0.05, rtol=0)


def test_personal_heads_stay_and_both_models_are_measured(tmp_path):
    folder = run_tiny(tmp_path, "fedrod")
    heads = [kept_of(folder, site, "personal_head") for site in ("site 1", "site 2")]
    assert changed(*heads) == {"weight", "bias"}
    assert not any("personal" in name for name in server_state(folder))
    assert {e["view"] for e in events(folder, "final")} == {"global", "personal"}


def test_a_step_moves_everything_once():
    client = new_client("fedrod")
    before = copied(client.net.state_dict()), copied(client.personal_head.state_dict())
    client.step([noise_batch()], client.phases["main"])
    assert changed(before[0], client.net.state_dict()) == before[0].keys()
    assert changed(before[1], client.personal_head.state_dict()) == {"weight", "bias"}
