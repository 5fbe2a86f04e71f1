"""FML's two nets teach each other; without that (and without dropout) one is FedAvg's and the other local training's,
bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, kept_of, new_client, noise_batch
from harness import assert_same_bits, events, run_tiny, server_state

CLIPPED = ("train.optimiser.clip=0.5",)


@pytest.mark.parametrize("clip", [(), CLIPPED], ids=["whole", "clipped"])
def test_a_shared_net_that_learns_from_labels_alone_is_fedavg(tmp_path, clip):
    """Without dropout, whose draws the two nets share; clipping couples them no more than the losses do."""
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, *clip)
    limit = run_tiny(tmp_path / "fml", "fml", *SHORT, "fml.beta=1", *clip)
    assert_same_bits(server_state(plain), server_state(limit))


@pytest.mark.parametrize("clip", [(), CLIPPED], ids=["whole", "clipped"])
def test_a_personal_net_that_learns_from_labels_alone_is_local_training(tmp_path, clip):
    alone = run_tiny(tmp_path / "local", "local", *SHORT, *clip)
    limit = run_tiny(tmp_path / "fml", "fml", *SHORT, "fml.alpha=1", *clip)
    for site in ("site 1", "site 2", "site 3"):
        assert_same_bits(kept_of(alone, site, "net"), kept_of(limit, site, "personal"))


def own_loss(student, teacher, labels, weight):
    """weight CE + (1 - weight) KL(teacher || student), written out."""
    divergence = (teacher.softmax(1) * (teacher.log_softmax(1) - student.log_softmax(1))).sum(1).mean()
    return weight * F.cross_entropy(student, labels) + (1 - weight) * divergence


def test_each_net_gets_the_gradient_of_its_own_loss_and_none_of_the_others():
    client = new_client("fml", "fml.alpha=0.3", "fml.beta=0.8")
    with torch.no_grad():
        client.personal.head.weight.mul_(-3)
    batch = noise_batch()
    out = client.outputs(batch)
    shared, personal = out.logits, out.personal_logits
    losses = {
        client.net: own_loss(shared, personal.detach(), batch.label, 0.8),
        client.personal: own_loss(personal, shared.detach(), batch.label, 0.3),
    }
    torch.testing.assert_close(client.loss(batch, out), sum(losses.values()))
    for net, loss in losses.items():
        parameters = list(net.parameters())
        found = torch.autograd.grad(client.loss(batch, out), parameters, retain_graph=True)
        expected = torch.autograd.grad(loss, parameters, retain_graph=True)
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other)


def distance_after(steps: int, *settings: str) -> tuple[float, float]:
    """How far apart the predictions of two nets are that start out different, before and after some steps."""
    client = new_client("fml", *settings)
    with torch.no_grad():
        client.personal.head.weight.mul_(-3)
    batch, distances = noise_batch(16), []
    for _ in range(steps + 1):
        out = client.outputs(batch)
        distances.append((out.logits.softmax(1) - out.personal_logits.softmax(1)).abs().mean().item())
        client.step([batch], client.workplace.phases["main"])
    return distances[0], distances[-1]


def test_mutual_learning_brings_the_predictions_together():
    before, after = distance_after(3, "fml.alpha=0.1", "fml.beta=0.1")
    assert after < 0.5 * before
    before, after = distance_after(3, "fml.alpha=1", "fml.beta=1")
    assert after > before


def test_each_view_predicts_with_its_net(tmp_path):
    client = new_client("fml")
    with torch.no_grad():
        client.personal.head.bias.add_(1.0)
    batch = noise_batch()
    client.workplace.set_mode(False)
    assert torch.equal(client.predict("global", batch), client.net(batch.image))
    assert torch.equal(client.predict("personal", batch), client.personal(batch.image))
    folder = run_tiny(tmp_path, "fml", *SHORT, "train.rounds=1")
    assert {e["view"] for e in events(folder, "final")} == {"global", "personal"}
    assert len(server_state(folder)) == len(client.net.state_dict())
