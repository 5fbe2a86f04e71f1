"""CReFF: FedAvg goes on underneath; federated features come to match the sites' class gradients; the classifier is
trained on them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import copied, new_client, new_server, noise_batch
from equipoise.components._gradient_matching import (
    FeatureFitting,
    feature_gradients,
    gradient_sums,
    matching_loss,
    with_constant,
)
from equipoise.components.retrained_head import packed, unpacked
from equipoise.contract.protocol import Replies, Reply, Scan, flatten
from equipoise.engine.payload_files import read_payload
from harness import assert_same_bits, events, run_tiny, server_state

FEW = ("creff.features=5", "creff.feature_steps=5", "creff.classifier_epochs=2")
CLASSES, SIZE = 4, 6


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shared_model(folder) -> dict[str, torch.Tensor]:
    """The averaged model among the server's tensors."""
    return {name: tensor for name, tensor in server_state(folder).items() if name.startswith("model/")}


def autograd_gradients(features: torch.Tensor, labels: torch.Tensor, classifier: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy gradients of a classifier with bias, class by class, by automatic differentiation."""
    found = []
    for label in range(len(classifier)):
        weight, bias = classifier[:, :-1].clone().requires_grad_(), classifier[:, -1].clone().requires_grad_()
        mine = labels == label
        loss = F.cross_entropy(features[mine] @ weight.T + bias, labels[mine], reduction="sum")
        slopes = torch.autograd.grad(loss, [weight, bias])
        found.append(torch.cat([slopes[0], slopes[1][:, None]], dim=1))
    return torch.stack(found)


# ---- limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_without_retraining_it_is_fedavg_bit_for_bit_and_scores_the_same(tmp_path, dropout):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", f"net.dropout={dropout}")
    limit = run_tiny(tmp_path / "creff", "creff", *FEW, "creff.classifier_epochs=0", f"net.dropout={dropout}")
    assert_same_bits(shared_model(plain), shared_model(limit))
    scores = [[e["metrics"] for e in events(folder, "evaluation")] for folder in (plain, limit)]
    assert scores[0] == scores[1]


def test_with_retraining_fedavg_still_goes_on_underneath_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg")
    folder = run_tiny(tmp_path / "creff", "creff", *FEW)
    assert_same_bits(shared_model(plain), shared_model(folder))


def test_what_predicts_is_the_averaged_body_under_the_retrained_classifier(tmp_path):
    folder = run_tiny(tmp_path, "creff", *FEW, "evaluation.rule='last'")
    state = server_state(folder)
    model = flatten(read_payload(folder / "models" / "global.safetensors"))[0]
    classifier = torch.cat([model["model/head.weight"], model["model/head.bias"][:, None]], dim=1)
    assert torch.equal(classifier, state["classifier"])
    body = {name for name in model if "head" not in name}
    assert all(torch.equal(model[name], state[name]) for name in body)
    assert not torch.equal(model["model/head.weight"], state["model/head.weight"])


# ---- gradients ------------------------------------------------------------------------------------------


def test_gradients_in_closed_form_are_those_of_automatic_differentiation():
    features, classifier = normal(20, SIZE), normal(CLASSES, SIZE + 1, seed=1)
    labels = torch.arange(20) % 3  # class 3 is missing
    sums = gradient_sums(features, labels, classifier)
    torch.testing.assert_close(sums, autograd_gradients(features, labels, classifier), rtol=1e-4, atol=1e-5)
    assert not sums[3].any()
    without_bias = gradient_sums(features, labels, classifier[:, :SIZE])
    biased = torch.cat([classifier[:, :SIZE], torch.zeros(CLASSES, 1)], dim=1)
    torch.testing.assert_close(without_bias, gradient_sums(features, labels, biased)[..., :SIZE])


def test_federated_features_have_the_mean_gradients_of_their_classes():
    features, classifier = normal(CLASSES, 5, SIZE), normal(CLASSES, SIZE + 1, seed=1)
    labels = torch.arange(CLASSES).repeat_interleave(5)
    expected = autograd_gradients(features.flatten(0, 1), labels, classifier) / 5
    torch.testing.assert_close(feature_gradients(features, classifier), expected, rtol=1e-4, atol=1e-5)


def test_the_matching_loss_is_one_minus_cosine_of_each_row_and_of_the_bias():
    one, two = normal(CLASSES, CLASSES, SIZE + 1), normal(CLASSES, CLASSES, SIZE + 1, seed=1)
    rows = (1 - F.cosine_similarity(one[..., :SIZE], two[..., :SIZE], dim=2)).sum(1)
    biases = 1 - F.cosine_similarity(one[..., SIZE], two[..., SIZE], dim=1)
    torch.testing.assert_close(matching_loss(one, two, SIZE), rows + biases)
    torch.testing.assert_close(matching_loss(one[..., :SIZE], two[..., :SIZE], SIZE), rows)
    torch.testing.assert_close(matching_loss(one, 3 * one, SIZE), torch.zeros(CLASSES), rtol=0, atol=1e-5)


def test_features_match_the_class_gradients_better_after_optimisation_and_unknown_classes_stay():
    classifier, start = normal(CLASSES, SIZE + 1), normal(CLASSES, 8, SIZE, seed=1)
    real = normal(40, SIZE, seed=2).relu()
    targets = gradient_sums(real, torch.arange(40) % CLASSES, classifier) / 10
    known = torch.tensor([True, True, True, False])
    fitted = FeatureFitting(start, classifier, 0.1, 0.1, 8).match(start, classifier, targets, known, steps=100)
    before, after = (matching_loss(feature_gradients(f, classifier), targets, SIZE) for f in (start, fitted))
    assert (after[:3] < 0.5 * before[:3]).all()
    assert torch.equal(fitted[3], start[3])


def test_in_a_round_the_servers_features_come_nearer_to_what_the_sites_sent():
    server = new_server("creff", "creff.features=8", "creff.classifier_epochs=1")
    start, classifier = server.state.features, server.state.classifier
    size = start.shape[-1]
    replies = []
    for site, seed in (("a", 1), ("b", 2)):
        labels = torch.arange(12) % (3 if site == "a" else 2)
        counts = labels.bincount(minlength=CLASSES).float()
        sums = gradient_sums(normal(12, size, seed=seed).relu(), labels, classifier)
        gradients = sums / counts.clamp(min=1)[:, None, None]
        model = copied(server.state.model)
        replies.append(Reply(site, {"model": model, "examples": 12, "gradients": gradients, "present": counts > 0}))
    conversation = server.round(1, ("a", "b"))
    next(conversation)
    with pytest.raises(StopIteration):
        conversation.send(Replies(replies))
    targets = (replies[0]["gradients"] + replies[1]["gradients"]) / 2
    targets[2] = replies[0]["gradients"][2]  # only one site has this class
    before, after = (
        matching_loss(feature_gradients(f, classifier), targets, size) for f in (start, server.state.features)
    )
    assert (after[:3] < before[:3] - 0.5).all()
    assert torch.equal(server.state.features[3], start[3])


def test_a_site_sends_mean_gradients_of_the_servers_classifier_on_its_features():
    client, batch = new_client("creff"), noise_batch(8)
    classifier = client.sides["retrained-head"].classifier
    classifier.copy_(normal(*classifier.shape, seed=3))
    client.class_counts.copy_(torch.tensor([3.0, 3.0, 2.0, 0.0]))
    action = client.train({})
    scan = next(action)
    assert isinstance(scan, Scan) and scan.part == "train"
    client.workplace.set_mode(False)
    with torch.no_grad():
        sums = scan.function(batch)
        features = client.net.features(batch.image)
    action.send(sums)
    with pytest.raises(StopIteration) as stop:
        action.send(None)
    reply = stop.value.value
    expected = autograd_gradients(features, batch.label, classifier)
    expected = expected / torch.tensor([3.0, 3.0, 2.0, 1.0])[:, None, None]
    torch.testing.assert_close(reply["gradients"], expected, rtol=1e-4, atol=1e-5)
    assert reply["present"].tolist() == [True, True, True, False]
    assert reply.keys() == {"model", "examples", "gradients", "present"}  # no class counts leave the site


# ---- the classifier ---------------------------------------------------------------------------------------


def test_retraining_takes_plain_gradient_steps():
    features = normal(CLASSES, 5, SIZE)
    fitting = FeatureFitting(features, torch.zeros(CLASSES, SIZE + 1), 0.1, 0.3, 100)

    def classifier_after(epochs: int) -> torch.Tensor:
        return fitting.retrain(features, epochs, torch.Generator().manual_seed(1))

    start, labels = classifier_after(0), torch.arange(CLASSES).repeat_interleave(5)
    slope = autograd_gradients(features.flatten(0, 1), labels, start).sum(0) / 20
    torch.testing.assert_close(classifier_after(1), start - 0.3 * slope, rtol=1e-4, atol=1e-5)


def test_the_retrained_classifier_knows_every_class_alike():
    centres = 4 * torch.eye(CLASSES, SIZE)
    features = centres[:, None] + 0.3 * normal(CLASSES, 10, SIZE)
    fitting = FeatureFitting(torch.zeros_like(features), torch.zeros(CLASSES, SIZE + 1), 0.1, 0.1, 8)
    classifier = fitting.retrain(features, 40, torch.Generator().manual_seed(1))
    predicted = (with_constant(features, classifier) @ classifier.T).argmax(2)
    assert torch.equal(predicted, torch.arange(CLASSES)[:, None].expand(CLASSES, 10))


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_is_packed_and_unpacked_with_or_without_bias(bias):
    head = {"head.weight": normal(CLASSES, SIZE)} | ({"head.bias": normal(CLASSES, seed=1)} if bias else {})
    classifier = packed(head)
    assert classifier.shape == (CLASSES, SIZE + bias)
    assert_same_bits(unpacked(classifier, head), head)


def a_round_with_classifiers_apart() -> tuple:
    """A server whose retrained classifier is not the averaged head, its message, and its features before and after."""
    server = new_server("creff", "creff.features=4", "creff.feature_steps=7", "creff.classifier_epochs=1")
    state = server.state
    state.classifier = normal(*state.classifier.shape, seed=7)
    assert not torch.equal(state.classifier, packed(state.model))
    before, classifier = state.features.clone(), state.classifier.clone()
    sums = gradient_sums(normal(12, before.shape[-1], seed=1).relu(), torch.arange(12) % CLASSES, classifier) / 3
    reply = {"examples": 12, "gradients": sums, "present": torch.ones(CLASSES, dtype=torch.bool)}
    conversation = server.round(1, ("a",))
    ask = next(conversation)
    model = {name: t + 0.5 for name, t in copied(state.model).items()}
    with pytest.raises(StopIteration):
        conversation.send(Replies([Reply("a", {"model": model, **reply})]))
    return server, ask.message("a"), classifier, sums, before


def test_sites_are_sent_the_retrained_classifier_and_not_the_averaged_head():
    _, message, classifier, _, _ = a_round_with_classifiers_apart()
    assert torch.equal(message["classifier"], classifier)
    assert not torch.equal(message["classifier"], packed(message["model"]))


def test_features_are_matched_under_the_classifier_that_the_sites_had():
    server, _, classifier, targets, before = a_round_with_classifiers_apart()
    known = torch.ones(CLASSES, dtype=torch.bool)
    for used, same in ((classifier, True), (packed(server.state.model), False)):
        fitted = FeatureFitting(before, used, 0.1, 0.01, 32).match(before, used, targets, known, steps=7)
        assert torch.equal(server.state.features, fitted) == same
