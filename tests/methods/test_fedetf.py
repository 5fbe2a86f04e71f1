"""FedETF: a simplex that never moves in the rounds, a projection and scale that learn, and fine-tuning in turns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, changed, copied, frozen_head_fedavg, new_client, new_server, noise_batch
from equipoise.components._cosine import SCALE, VECTORS
from equipoise.contract.method import Batch
from equipoise.contract.protocol import Scan, Train
from equipoise.core.errors import UserError
from equipoise.methods.fedetf import FedETFNet
from harness import all_state, assert_same_bits, events, run_tiny, server_state

NO_TUNING = ("fedetf.finetune_epochs=0", "fedetf.turns=0")
ONE_TURN = ("fedetf.turns=1", "fedetf.turn_epochs=1")


# ---- the simplex ----------------------------------------------------------------------------------------------


def test_class_vectors_stay_a_simplex_bit_for_bit_through_all_rounds(tmp_path):
    first = new_server("fedetf").state.model[VECTORS]
    last = server_state(run_tiny(tmp_path, "fedetf", *NO_TUNING))[f"model/{VECTORS}"]
    assert torch.equal(first, last)
    expected = torch.full((4, 4), -1 / 3).fill_diagonal_(1.0)
    torch.testing.assert_close(last @ last.T, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("settings", "size"), [((), 4), (("fedetf.size=10",), 10)])
def test_logits_are_scaled_cosines_of_projected_features_and_the_simplex(settings, size):
    client, batch = new_client("fedetf", "fedetf.scale=3", *settings), noise_batch(8)
    client.workplace.set_mode(False)
    head = client.net.head
    assert head.class_vectors.shape == (4, size)
    projected = client.net.features(batch.image) @ head.projection.weight.T + head.projection.bias
    cosines = F.cosine_similarity(projected[:, None], head.class_vectors[None], dim=2)
    torch.testing.assert_close(client.outputs(batch).logits, 3 * cosines)


def test_fewer_projected_features_than_classes_are_refused():
    with pytest.raises(UserError, match="at least 4 dimensions, not 3"):
        new_server("fedetf", "fedetf.size=3")


def test_body_projection_and_scale_train_and_travel_and_the_simplex_does_not():
    client = new_client("fedetf", "train.optimiser.weight_decay=0.1")
    before = copied(client.net.state_dict())
    client.step([noise_batch(8)], client.workplace.phases["main"])
    moved = changed(before, client.net.state_dict())
    assert {SCALE, "head.projection.weight", "head.projection.bias", "body.0.weight"} <= moved
    assert VECTORS not in moved
    assert client.update()["model"].keys() == before.keys() - {VECTORS}


# ---- the balanced loss ----------------------------------------------------------------------------------------


def test_the_loss_is_balanced_by_local_counts_with_one_image_for_missing_classes():
    client = new_client("fedetf", class_counts=(6.0, 3.0, 1.0, 0.0))
    batch = noise_batch(8)
    out = client.outputs(batch)
    adjusted = out.logits + torch.tensor([6.0, 3.0, 1.0, 1.0]).log()
    torch.testing.assert_close(client.loss(batch, out), F.cross_entropy(adjusted, batch.label))


def test_without_the_exponent_the_loss_is_cross_entropy():
    client, batch = new_client("fedetf", "fedetf.gamma=0"), noise_batch(8)
    out = client.outputs(batch)
    torch.testing.assert_close(client.loss(batch, out), F.cross_entropy(out.logits, batch.label))


def test_without_the_exponent_it_is_fedavg_under_an_untrained_head_bit_for_bit(tmp_path):
    """All margins are then 0, and adding them changes no bit."""
    settings = (*SHORT, *NO_TUNING, "fedetf.gamma=0", "net.dropout=0.2")
    frozen = frozen_head_fedavg("fedetf", FedETFNet, (VECTORS,))
    plain = server_state(run_tiny(tmp_path / "fedavg", frozen, *settings, known_as="fedetf"))
    limit = server_state(run_tiny(tmp_path / "fedetf", "fedetf", *settings))
    assert limit.keys() - plain.keys() == {f"model/{VECTORS}"}
    assert_same_bits(plain, {name: limit[name] for name in plain})


# ---- fine-tuning ----------------------------------------------------------------------------------------------


def test_without_fine_tuning_the_personal_model_is_the_global_one(tmp_path):
    folder = run_tiny(tmp_path, "fedetf", *NO_TUNING, "evaluation.trained=false")
    scores = {
        view: [(e["round"], e["site"], e["metrics"]) for e in events(folder, "evaluation") if e["view"] == view]
        for view in ("global", "personal")
    }
    assert scores["global"] and scores["global"] == scores["personal"]


def test_fine_tuning_leaves_no_trace_in_the_rounds(tmp_path):
    without = run_tiny(tmp_path / "without", "fedetf", *SHORT, *NO_TUNING)
    tuned = run_tiny(tmp_path / "tuned", "fedetf", *SHORT, *ONE_TURN)
    assert_same_bits(all_state(without), all_state(tuned))
    losses = [
        [e["metrics"]["loss"] for e in events(f, "evaluation") if e["view"] == "personal"] for f in (without, tuned)
    ]
    assert losses[0] != losses[1]


def test_a_site_trains_once_more_and_then_fits_features_that_stand_still():
    client = new_client("fedetf", "fedetf.finetune_epochs=2", *ONE_TURN)
    adapt = client.adapt()
    assert next(adapt) == Train(epochs=2)
    scan = adapt.send(None)
    assert isinstance(scan, Scan) and scan.reduce == "concatenate"
    assert next(new_client("fedetf").adapt()) == Train()  # as many epochs as in the rounds
    assert list(new_client("fedetf", *NO_TUNING).adapt()) == [Train(epochs=0)]


def test_turns_move_simplex_and_projection_only_and_fit_the_site_better():
    client, batch = new_client("fedetf", "fedetf.turns=5"), noise_batch(24)
    client.workplace.set_mode(False)
    before = copied(client.net.state_dict())
    with torch.no_grad():
        seen = client.sample(batch)

    def loss() -> float:
        return F.cross_entropy(client.net.head(seen["features"]), seen["labels"]).item()

    start = loss()
    client.take_turns(seen["features"], seen["labels"])
    assert changed(before, client.net.state_dict()) == {VECTORS, "head.projection.weight", "head.projection.bias"}
    assert loss() < start - 0.2


def test_the_simplex_takes_the_first_step_of_plain_gradient_descent():
    """One turn of one step each, seen with a projection that cannot move."""
    client = new_client("fedetf", *ONE_TURN, "fedetf.simplex_lr=0.5", "fedetf.projection_lr=1e-12")
    client.workplace.set_mode(False)
    batch: Batch = noise_batch(6)
    with torch.no_grad():
        seen = client.sample(batch)
    vectors = client.net.head.class_vectors
    loss = F.cross_entropy(client.net.head(seen["features"]), seen["labels"])
    expected = (vectors - 0.5 * torch.autograd.grad(loss, vectors)[0]).detach()
    client.take_turns(seen["features"], seen["labels"])
    torch.testing.assert_close(vectors.detach(), expected)
