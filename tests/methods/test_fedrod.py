"""FedRoD's generic branch is FedAvg under the balanced loss, bit for bit; its personal head adds to it and stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, changed, copied, kept_of, new_client, noise_batch
from equipoise.losses import balanced_softmax
from harness import assert_same_bits, events, run_tiny, server_state

ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")


@pytest.mark.parametrize("optimiser", [(), ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(("gamma", "loss"), [(1, "balanced_softmax"), (0, "ce")])
def test_the_generic_branch_is_fedavg_under_its_loss(tmp_path, gamma, loss, optimiser):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, f"train.loss='{loss}'", *optimiser)
    limit = run_tiny(tmp_path / "fedrod", "fedrod", *SHORT, f"fedrod.gamma={gamma}", *optimiser)
    assert_same_bits(server_state(plain), server_state(limit))


@pytest.mark.parametrize("setting", ["train.optimiser.clip=0.5", "net.dropout=0.3"])
def test_neither_clipping_nor_dropout_couples_the_branches(tmp_path, setting):
    """The heads see the same draw of dropout, and each is clipped by the norm of its own model."""
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, "train.loss='balanced_softmax'", setting)
    limit = run_tiny(tmp_path / "fedrod", "fedrod", *SHORT, setting)
    assert_same_bits(server_state(plain), server_state(limit))


def test_each_branch_gets_the_gradient_of_its_own_loss_and_none_of_the_others():
    client = new_client("fedrod")
    with torch.no_grad():
        client.personal_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    batch = noise_batch()
    out = client.outputs(batch)
    losses = {
        client.net: balanced_softmax(out.logits, batch.label, client.class_counts),
        client.personal_head: F.cross_entropy(out.personal_logits, batch.label),
    }
    for module, loss in losses.items():
        parameters = list(module.parameters())
        found = torch.autograd.grad(client.loss(batch, out), parameters, retain_graph=True)
        expected = torch.autograd.grad(loss, parameters, retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_at_first_the_personal_model_is_the_generic_one_and_then_their_sum():
    client = new_client("fedrod")
    batch = noise_batch()
    client.workplace.set_mode(False)
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


def test_the_personal_head_learns_the_sites_frequencies_and_the_generic_one_does_not():
    """One image under many labels: all that can be learned is how frequent classes are."""
    client = new_client("fedrod", "train.optimiser.lr=0.05", class_counts=(14.0, 1.0, 1.0, 0.0))
    client.workplace.set_mode(True, "eval")
    batch = noise_batch(16)
    batch.image, batch.label = batch.image[:1].expand_as(batch.image), torch.tensor([1, 2] + [0] * 14)
    for _ in range(60):
        client.step([batch], client.workplace.phases["main"])
    client.workplace.set_mode(False)
    generic, personal = (client.predict(view, batch)[0, :3].softmax(0).detach() for view in ("global", "personal"))
    torch.testing.assert_close(generic, torch.full((3,), 1 / 3), atol=0.02, rtol=0)
    torch.testing.assert_close(personal, torch.tensor([14.0, 1.0, 1.0]) / 16, atol=0.02, rtol=0)


def test_personal_heads_stay_and_both_models_are_measured(tmp_path):
    folder = run_tiny(tmp_path, "fedrod", *SHORT)
    heads = [kept_of(folder, site, "personal_head") for site in ("site 1", "site 2")]
    assert changed(*heads) == {"weight", "bias"}
    assert not any("personal" in name for name in server_state(folder))
    assert {e["view"] for e in events(folder, "final")} == {"global", "personal"}


def test_a_step_moves_everything_once():
    client = new_client("fedrod")
    before = copied(client.net.state_dict()), copied(client.personal_head.state_dict())
    client.step([noise_batch()], client.workplace.phases["main"])
    assert changed(before[0], client.net.state_dict()) == before[0].keys()
    assert changed(before[1], client.personal_head.state_dict()) == {"weight", "bias"}
