"""FedRS spares the classes that a site lacks; with a factor of 1 it is FedAvg bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, new_client, noise_batch
from harness import all_state, assert_same_bits, run_tiny


def head_gradient(client) -> torch.Tensor:
    """The gradient of the head's weights (C, D) for a batch without the last class."""
    batch = noise_batch()
    (gradient,) = torch.autograd.grad(client.loss(batch, client.outputs(batch)), client.net.head.weight)
    return gradient


@pytest.mark.parametrize("loss", ["ce", "balanced_softmax"])
def test_with_a_factor_of_one_it_is_fedavg_bit_for_bit(tmp_path, loss):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, f"train.loss='{loss}'")
    limit = run_tiny(tmp_path / "fedrs", "fedrs", *SHORT, "fedrs.alpha=1", f"train.loss='{loss}'")
    assert_same_bits(all_state(plain), all_state(limit))


def test_a_site_with_every_class_trains_as_in_fedavg():
    counts = (6.0, 3.0, 1.0, 2.0)
    assert torch.equal(
        head_gradient(new_client("fedrs", "fedrs.alpha=0", class_counts=counts)),
        head_gradient(new_client("fedavg", class_counts=counts)),
    )


def test_with_a_factor_of_zero_missing_classes_get_no_gradient():
    """The class counts of the client leave out the last class."""
    gradient = head_gradient(new_client("fedrs", "fedrs.alpha=0"))
    assert not gradient[3].any() and gradient[:3].any(dim=1).all()
    assert head_gradient(new_client("fedavg"))[3].any()


def test_in_between_their_logits_and_gradients_are_scaled():
    client, batch = new_client("fedrs", "fedrs.alpha=0.5"), noise_batch()
    out = client.outputs(batch)
    scaled = out.logits * torch.tensor([1.0, 1.0, 1.0, 0.5])
    torch.testing.assert_close(client.loss(batch, out), F.cross_entropy(scaled, batch.label))
    (gradient,) = torch.autograd.grad(client.loss(batch, out), out.logits)
    torch.testing.assert_close(gradient[:, 3], 0.5 * scaled.detach().softmax(1)[:, 3] / len(batch.label))


def test_predictions_are_not_restricted():
    client, batch = new_client("fedrs", "fedrs.alpha=0"), noise_batch()
    client.workplace.set_mode(False)
    assert torch.equal(client.predict("global", batch), client.net(batch.image))


def test_graded_scales_every_class_by_its_share_of_the_most_frequent_one():
    """alpha + (1 - alpha) n_c / n_max of 6, 3, 1 and no images."""
    client, batch = new_client("fedrs", "fedrs.alpha=0.5", "fedrs.graded=true"), noise_batch()
    out = client.outputs(batch)
    scaled = out.logits * torch.tensor([1.0, 0.75, 0.5 + 0.5 / 6, 0.5])
    torch.testing.assert_close(client.loss(batch, out), F.cross_entropy(scaled, batch.label))


def test_graded_spares_no_class_where_all_are_equally_frequent():
    even = (5.0, 5.0, 5.0, 5.0)
    client, plain = (new_client(*which, class_counts=even) for which in (("fedrs", "fedrs.graded=true"), ("fedavg",)))
    assert torch.equal(head_gradient(client), head_gradient(plain))
