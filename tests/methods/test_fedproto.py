"""FedProto: local training in the limit, prototypes as the only thing exchanged, and prediction by the nearest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from clients import new_client, new_server, noise_batch
from equipoise.contract.method import Batch
from equipoise.contract.protocol import Replies, Reply, Scan, Train
from harness import assert_same_bits, events, run_tiny, server_state, site_states


def merged(server, *sent: tuple[float, list[float]]) -> torch.Tensor:
    """The first column of the server's prototypes after a round in which sites sent constant ones, with counts."""
    replies = [
        Reply(
            str(index),
            {
                "prototypes": torch.full(server.state.prototypes.shape, value),
                "class_counts": torch.tensor(counts),
            },
        )
        for index, (value, counts) in enumerate(sent)
    ]
    conversation = server.round(1, [reply.site for reply in replies])
    next(conversation)
    with pytest.raises(StopIteration):
        conversation.send(Replies(replies))
    return server.state.prototypes[:, 0]


def test_with_weight_zero_it_is_local_learning_bit_for_bit(tmp_path):
    local = run_tiny(tmp_path / "local", "local")
    limit = run_tiny(tmp_path / "fedproto", "fedproto", "fedproto.weight=0", "fedproto.predict='head'")
    assert_same_bits(site_states(local), site_states(limit))
    scores = [[e["metrics"] for e in events(folder, "evaluation")] for folder in (local, limit)]
    assert scores[0] == scores[1]


def test_a_reply_holds_class_means_and_counts_and_no_weights():
    client, batch = new_client("fedproto"), noise_batch(8)
    action = client.train({})
    assert isinstance(next(action), Train)
    scan = action.send(None)
    assert isinstance(scan, Scan) and scan.part == "train"
    client.workplace.set_mode(False)
    with torch.no_grad(), pytest.raises(StopIteration) as stop:
        action.send(scan.function(batch))
    reply, features = stop.value.value, client.net.features(batch.image).detach()
    assert reply.keys() == {"prototypes", "class_counts"} == client.discloses["train"].keys()
    for label in range(3):
        torch.testing.assert_close(reply["prototypes"][label], features[batch.label == label].mean(0))
    assert reply["class_counts"].tolist() == [3, 3, 2, 0] and not reply["prototypes"][3].any()


def test_in_a_run_the_server_holds_prototypes_alone(tmp_path):
    state = server_state(run_tiny(tmp_path, "fedproto"))
    assert state.keys() == {"prototypes"}
    assert state["prototypes"].any(dim=1).all()


def test_the_server_weighs_sites_by_their_images_of_a_class():
    server = new_server("fedproto")
    assert merged(server, (1.0, [3.0, 1.0, 0.0, 0.0]), (2.0, [1.0, 0.0, 2.0, 0.0])).tolist() == [1.25, 1.0, 2.0, 0.0]


def test_with_uniform_aggregation_sites_that_have_a_class_count_alike():
    server = new_server("fedproto", "train.aggregation='uniform'")
    assert merged(server, (1.0, [3.0, 1.0, 0.0, 0.0]), (2.0, [1.0, 0.0, 2.0, 0.0])).tolist() == [1.5, 1.0, 2.0, 0.0]


def test_a_class_that_nobody_sends_keeps_its_prototype():
    server = new_server("fedproto")
    server.state.prototypes = torch.full_like(server.state.prototypes, 7.0)
    assert merged(server, (1.0, [1.0, 0.0, 0.0, 1.0])).tolist() == [1.0, 7.0, 7.0, 1.0]


def test_the_loss_adds_the_distance_to_known_prototypes():
    client = new_client("fedproto", "fedproto.weight=0.5")
    size = client.net.feature_size
    generator = torch.Generator().manual_seed(0)
    client.prototypes[:2].copy_(torch.randn(2, size, generator=generator))  # class 2 has none yet
    features, logits = torch.randn(6, size, generator=generator), torch.randn(6, 4, generator=generator)
    labels = torch.arange(6) % 3
    squares = (features - client.prototypes[labels]).square()[labels < 2].sum()
    expected = F.cross_entropy(logits, labels) + 0.5 * squares / features.numel()
    out = SimpleNamespace(features=features, logits=logits)
    torch.testing.assert_close(client.loss(Batch(label=labels), out), expected)


def test_training_draws_features_to_the_prototypes_of_their_classes():
    client, batch = new_client("fedproto", "fedproto.weight=20"), noise_batch(12)
    size = client.net.feature_size
    client.prototypes.copy_(torch.rand(4, size, generator=torch.Generator().manual_seed(0)))

    def distance() -> float:
        return F.mse_loss(client.outputs(batch).features, client.prototypes[batch.label]).item()

    before = distance()
    for _ in range(10):
        client.step([batch], client.workplace.phases["main"])
    assert distance() < 0.7 * before


def test_a_site_predicts_the_class_of_the_nearest_known_prototype():
    client, batch = new_client("fedproto"), noise_batch(8)
    client.workplace.set_mode(False)
    features = client.net.features(batch.image).detach()
    client.prototypes[1].copy_(features[0])
    client.prototypes[3].copy_(features[5])
    predicted = client.predict("personal", batch).argmax(1)
    near = torch.cdist(features.double(), client.prototypes[[1, 3]].double())
    assert torch.equal(predicted, torch.tensor([1, 3])[near.argmin(1)])
    assert predicted[0] == 1 and predicted[5] == 3


def test_before_the_first_prototypes_and_on_request_the_head_predicts():
    batch = noise_batch(8)
    for settings, known in ((("fedproto.predict='head'",), True), ((), False)):
        client = new_client("fedproto", *settings)
        client.workplace.set_mode(False)
        client.prototypes.fill_(float(known))
        assert torch.equal(client.predict("personal", batch), client.net(batch.image))
