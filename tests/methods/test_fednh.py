"""FedNH: prototypes evenly spread at first, still during local training, smoothed by the server after it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, copied, frozen_head_fedavg, new_client, new_server, noise_batch
from equipoise.components._cosine import SCALE, VECTORS
from equipoise.contract.protocol import Replies, Reply
from equipoise.methods.fednh import FedNHNet, smoothed
from harness import assert_same_bits, run_tiny, server_state


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=1)


def first_prototypes(*settings: str) -> torch.Tensor:
    return new_server("fednh", *settings).state.model[VECTORS]


# ---- the start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "cosine"), [("orthogonal", 0.0), ("simplex", -1 / 3)])
def test_prototypes_start_evenly_spread_over_the_sphere(start, cosine):
    prototypes = first_prototypes(f"fednh.start='{start}'")
    expected = torch.full((4, 4), cosine).fill_diagonal_(1.0)
    torch.testing.assert_close(prototypes @ prototypes.T, expected, rtol=0, atol=1e-5)


def test_the_first_prototypes_come_of_the_seed():
    assert torch.equal(first_prototypes(), first_prototypes())
    assert torch.equal(first_prototypes(), new_client("fednh").net.head.class_vectors)
    assert not torch.allclose(first_prototypes(), first_prototypes("seed=2"))


# ---- limits ---------------------------------------------------------------------------------------------------


def test_with_rho_one_prototypes_keep_every_bit_and_sites_send_none(tmp_path):
    folder = run_tiny(tmp_path, "fednh", "fednh.rho=1")
    assert torch.equal(server_state(folder)[f"model/{VECTORS}"], first_prototypes())
    action = new_client("fednh", "fednh.rho=1").train({})
    next(action)
    with pytest.raises(StopIteration) as stop:
        action.send(None)
    assert stop.value.value.keys() == {"model", "examples"}


@pytest.mark.parametrize(("learn", "fixed"), [("true", (VECTORS,)), ("false", (VECTORS, SCALE))])
def test_with_rho_one_it_is_fedavg_under_an_untrained_head_bit_for_bit(tmp_path, learn, fixed):
    settings = (*SHORT, "fednh.rho=1", f"fednh.learn_scale={learn}", "net.dropout=0.2")
    frozen = frozen_head_fedavg("fednh", FedNHNet, fixed)
    plain = server_state(run_tiny(tmp_path / "fedavg", frozen, *settings, known_as="fednh"))
    limit = server_state(run_tiny(tmp_path / "fednh", "fednh", *settings))
    assert limit.keys() - plain.keys() == {f"model/{entry}" for entry in fixed}
    assert_same_bits(plain, {name: limit[name] for name in plain})


def test_below_one_they_move_and_keep_their_length(tmp_path):
    moved = server_state(run_tiny(tmp_path, "fednh"))[f"model/{VECTORS}"]
    torch.testing.assert_close(moved.norm(dim=1), torch.ones(4))
    cosines = (moved * first_prototypes()).sum(1)
    assert (cosines < 1 - 1e-4).all() and (cosines > 0.9).all()  # two rounds at rho 0.9 are small steps


def test_a_fixed_scale_keeps_every_bit_and_a_learnt_one_moves(tmp_path):
    fixed = server_state(run_tiny(tmp_path / "fixed", "fednh", "fednh.learn_scale=false", "fednh.scale=30"))
    learnt = server_state(run_tiny(tmp_path / "learnt", "fednh", "fednh.scale=30"))
    assert fixed[f"model/{SCALE}"].item() == 30
    assert learnt[f"model/{SCALE}"].item() != 30


# ---- a site ---------------------------------------------------------------------------------------------------


def test_logits_are_scaled_cosines_of_features_and_prototypes():
    client, batch = new_client("fednh", "fednh.scale=7"), noise_batch(8)
    client.workplace.set_mode(False)
    features = client.net.features(batch.image)
    cosines = F.cosine_similarity(features[:, None], client.net.head.class_vectors[None], dim=2)
    torch.testing.assert_close(client.outputs(batch).logits, 7 * cosines)
    assert torch.equal(client.predict("global", batch), client.outputs(batch).logits)


def test_prototypes_stand_still_while_a_site_trains():
    client = new_client("fednh", "train.optimiser.weight_decay=0.1")
    before = copied(client.net.state_dict())
    client.step([noise_batch(8)], client.workplace.phases["main"])
    after = client.net.state_dict()
    assert torch.equal(after[VECTORS], before[VECTORS])
    assert not torch.equal(after["body.0.weight"], before["body.0.weight"])


def test_a_site_sends_the_mean_direction_of_each_class_and_not_the_prototypes_it_received():
    client, batch = new_client("fednh"), noise_batch(8)
    action = client.train({})
    next(action)
    scan = action.send(None)
    client.workplace.set_mode(False)
    with torch.no_grad(), pytest.raises(StopIteration) as stop:
        action.send(scan.function(batch))
    reply, features = stop.value.value, client.net.features(batch.image).detach()
    for label in range(3):
        rows = features[batch.label == label]
        mean = (rows / rows.norm(dim=1, keepdim=True)).mean(0)
        torch.testing.assert_close(reply["prototypes"][label], mean / mean.norm())
    assert reply["class_counts"].tolist() == [3, 3, 2, 0] and not reply["prototypes"][3].any()
    assert VECTORS not in reply["model"] and SCALE in reply["model"]


# ---- the server -----------------------------------------------------------------------------------------------


def test_smoothing_moves_a_prototype_towards_its_class_and_leaves_absent_classes_alone():
    old, means = unit(4, 6), 5 * unit(4, 6, seed=1)
    found = torch.tensor([True, True, False, True])
    new = smoothed(old, means, found, 0.8)
    for label in (0, 1, 3):
        blend = 0.8 * old[label] + 0.2 * means[label] / means[label].norm()
        torch.testing.assert_close(new[label], blend / blend.norm())
    assert torch.equal(new[2], old[2])
    torch.testing.assert_close(smoothed(old, means, found, 0.0)[found], means[found] / 5)


def test_the_server_weighs_directions_by_class_counts():
    server = new_server("fednh", "fednh.rho=0.5")
    old, size = server.state.model[VECTORS], server.state.model[VECTORS].shape[1]
    sent = {"a": (unit(4, size, seed=1), [3.0, 1.0, 0.0, 0.0]), "b": (unit(4, size, seed=2), [1.0, 0.0, 2.0, 0.0])}
    model = {name: tensor for name, tensor in copied(server.state.model).items() if name != VECTORS}
    replies = [
        Reply(site, {"model": model, "examples": 4, "prototypes": prototypes, "class_counts": torch.tensor(counts)})
        for site, (prototypes, counts) in sent.items()
    ]
    conversation = server.round(1, tuple(sent))
    next(conversation)
    with pytest.raises(StopIteration):
        conversation.send(Replies(replies))
    new, (first, second) = server.state.model[VECTORS], (sent["a"][0], sent["b"][0])
    for label, mean in enumerate((0.75 * first[0] + 0.25 * second[0], first[1], second[2])):
        blend = 0.5 * old[label] + 0.5 * mean / mean.norm()
        torch.testing.assert_close(new[label], blend / blend.norm())
    assert torch.equal(new[3], old[3])
