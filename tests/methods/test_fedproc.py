"""FedProc's prototypes, its contrast with them and the schedule between contrast and supervised loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, copied, new_client, new_server, noise_batch
from equipoise.contract.method import Client
from equipoise.contract.protocol import Replies, Reply, Scan
from harness import all_state, assert_same_bits, run_tiny, server_state

ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")


def instructed(contrast: float, known: tuple[bool, ...] = (True, True, True, True), *settings: str) -> Client:
    """A client that received prototypes and a weight of the contrast."""
    client = new_client("fedproc", *settings)
    client.prototypes.copy_(torch.randn(client.prototypes.shape, generator=torch.Generator().manual_seed(1)))
    client.known.copy_(torch.tensor(known))
    client.contrast.fill_(contrast)
    return client


@pytest.mark.parametrize("optimiser", [(), ADAM], ids=["sgd", "adam"])
def test_without_the_contrast_it_is_fedavg_bit_for_bit(tmp_path, optimiser):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, *optimiser)
    limit = run_tiny(tmp_path / "fedproc", "fedproc", *SHORT, "fedproc.alpha=0", *optimiser)
    assert_same_bits(all_state(plain), all_state(limit))


@pytest.mark.parametrize(
    ("alpha", "weights"), [(1.0, [0.0, 0.75, 0.5, 0.25]), (0.4, [0.0, 0.3, 0.2, 0.1])], ids=["paper", "scaled"]
)
def test_the_contrast_fades_over_the_rounds_once_there_are_prototypes(alpha, weights):
    server = new_server("fedproc", "train.rounds=4", f"fedproc.alpha={alpha}")
    sent = [next(server.round(number, ("a",))).payload["contrast"] for number in (1, 2, 3, 4)]
    assert sent == pytest.approx(weights)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_mixes_supervised_loss_and_contrast(weight):
    client, batch = instructed(weight, (True,) * 4, "fedproc.temperature=0.5"), noise_batch()
    out = client.outputs(batch)
    cosines = F.cosine_similarity(out.features[:, None], client.prototypes[None], dim=-1)
    contrast = F.cross_entropy(cosines / 0.5, batch.label)
    expected = (1 - weight) * F.cross_entropy(out.logits, batch.label) + weight * contrast
    torch.testing.assert_close(client.loss(batch, out), expected)


def test_a_class_without_a_prototype_neither_attracts_nor_repels():
    client, batch = instructed(1.0, (True, True, False, False)), noise_batch(6)
    features = client.outputs(batch).features
    out = type("Out", (), {"features": features, "logits": torch.zeros(6, 4)})
    (gradient,) = torch.autograd.grad(client.loss(batch, out), features)
    unknown = batch.label == 2
    assert not gradient[unknown].any() and gradient[~unknown].any(dim=1).all()
    client.prototypes[2:].fill_(1e3)
    (again,) = torch.autograd.grad(client.loss(batch, out), features)
    torch.testing.assert_close(again, gradient)


def test_features_are_drawn_to_the_prototypes_of_their_classes():
    client, batch = instructed(1.0), noise_batch(12)
    before = client.loss(batch, client.outputs(batch)).item()
    for _ in range(10):
        client.step([batch], client.workplace.phases["main"])
    assert client.loss(batch, client.outputs(batch)).item() < before - 0.2


def test_a_site_sends_the_mean_feature_of_each_class_that_it_has():
    client, batch = instructed(0.5), noise_batch(8)
    action = client.train({})
    next(action)
    scan = action.send(None)
    assert isinstance(scan, Scan) and scan.part == "train"
    client.workplace.set_mode(False)
    with torch.no_grad(), pytest.raises(StopIteration) as stop:
        action.send(scan.function(batch))
    reply, features = stop.value.value, client.outputs(batch).features.detach()
    torch.testing.assert_close(features.norm(dim=1), torch.ones(8))
    assert reply["class_counts"].tolist() == [3, 3, 2, 0]
    for label in range(3):
        torch.testing.assert_close(reply["prototypes"][label], features[batch.label == label].mean(0))
    assert not reply["prototypes"][3].any()


def test_the_server_weighs_class_means_by_counts_and_keeps_what_nobody_renewed():
    server = new_server("fedproc")
    shape = server.state.prototypes.shape
    server.state.prototypes = torch.full(shape, 7.0)
    server.state.known = torch.tensor([False, False, True, False])
    conversation = server.round(2, ("a", "b"))
    next(conversation)
    replies = [
        Reply(
            site,
            {
                "model": copied(server.state.model),
                "examples": 5,
                "prototypes": torch.full(shape, value),
                "class_counts": torch.tensor(counts),
            },
        )
        for site, value, counts in (("a", 1.0, [3.0, 1.0, 0.0, 0.0]), ("b", 2.0, [1.0, 0.0, 0.0, 0.0]))
    ]
    with pytest.raises(StopIteration):
        conversation.send(Replies(replies))
    assert server.state.prototypes[:, 0].tolist() == [1.25, 1.0, 7.0, 7.0]
    assert server.state.known.tolist() == [True, True, True, False]


def test_in_a_run_every_class_gets_a_prototype(tmp_path):
    state = server_state(run_tiny(tmp_path, "fedproc"))
    assert state["known"].all() and state["prototypes"].any(dim=1).all()
    assert (state["prototypes"].norm(dim=1) <= 1.0 + 1e-5).all()
