"""IDA's weights by distance, size and training accuracy; by size alone it is FedAvg bit for bit."""

from __future__ import annotations

import pytest
import torch

from clients import SHORT, copied, new_client, new_server, noise_batch
from equipoise.contract.method import Server
from equipoise.contract.protocol import Evaluate, Replies, Reply
from harness import all_state, assert_same_bits, run_tiny

SIZE_ALONE = ("ida.distance=false", "ida.size=true")


def weights_of(server: Server, replies: Replies) -> list[float]:
    return server.sides["inverse-distance"].weights(replies)


def replies_of(server: Server, shifts: list[float], **facts: list[float]) -> Replies:
    """One site per shift, its model moved by it from the server's; further facts per site."""
    return Replies(
        [
            Reply(
                f"site {index}",
                {"model": {n: t + shift for n, t in copied(server.state.model).items()}, "examples": 10}
                | {name: values[index] for name, values in facts.items()},
            )
            for index, shift in enumerate(shifts)
        ]
    )


def shares(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


# ---- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "aggregation"), [(SIZE_ALONE, "size"), (("ida.distance=false",), "uniform")], ids=["size", "none"]
)
def test_without_distances_it_is_fedavg_bit_for_bit(tmp_path, settings, aggregation):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, f"train.aggregation='{aggregation}'")
    limit = run_tiny(tmp_path / "ida", "ida", *SHORT, *settings)
    assert_same_bits(all_state(plain), all_state(limit))


def test_models_at_equal_distances_weigh_the_same():
    server = new_server("ida")
    assert shares(weights_of(server, replies_of(server, [-1.0, 1.0]))) == pytest.approx([0.5, 0.5])
    assert shares(weights_of(server, replies_of(server, [0.0, 0.0, 0.0]))) == pytest.approx([1 / 3] * 3)


# ---- weights -----------------------------------------------------------------------------------------


def test_an_outlier_counts_by_its_inverse_distance_to_the_mean():
    """Shifts 0, 1 and 5 lie 2, 1 and 3 from their mean: weights 1/2, 1 and 1/3."""
    server = new_server("ida")
    assert shares(weights_of(server, replies_of(server, [0.0, 1.0, 5.0]))) == pytest.approx([3 / 11, 6 / 11, 2 / 11])
    by_distance = server.state.model["head.weight"] + (0 * 3 + 1 * 6 + 5 * 2) / 11
    conversation = server.round(1, ("site 0", "site 1", "site 2"))
    next(conversation)
    with pytest.raises(StopIteration):
        conversation.send(replies_of(server, [0.0, 1.0, 5.0]))
    torch.testing.assert_close(server.state.model["head.weight"], by_distance)


def test_batch_norm_statistics_do_not_make_an_outlier():
    server = new_server("ida")
    replies = replies_of(server, [0.0, 1.0, 5.0])
    before = weights_of(server, replies)
    replies[1]["model"]["body.1.running_var"].fill_(1e6)
    assert weights_of(server, replies) == before


def test_factors_multiply_and_accuracy_counts_from_chance_up():
    """Four classes: an accuracy of 0.1 counts as 0.25."""
    server = new_server("ida", "ida.size=true", "ida.accuracy=true")
    replies = replies_of(server, [0.0, 1.0, 5.0], examples=[30, 10, 20], accuracy=[0.5, 1.0, 0.1])
    expected = [30 / 2 / 0.5, 10 / 1 / 1.0, 20 / 3 / 0.25]
    assert shares(weights_of(server, replies)) == pytest.approx(shares(expected))


def test_a_site_tells_its_training_accuracy_only_where_it_is_asked():
    assert "accuracy" not in sent_by(new_client("ida"))
    client, batch = new_client("ida", "ida.accuracy=true"), noise_batch()
    client.workplace.set_mode(False)
    right = (client.net(batch.image).argmax(1) == batch.label).double().mean().item()
    assert sent_by(client)["accuracy"] == pytest.approx(right)


def sent_by(client) -> dict:
    """The reply of a site whose only images are a batch of noise."""
    action, batch, result = client.train({}), noise_batch(), None
    while True:
        try:
            work = action.send(result)
        except StopIteration as stop:
            return stop.value
        if isinstance(work, Evaluate):
            assert work.part == "train"
            with torch.no_grad():
                result = {
                    name: {"confusion": client.setting.task.confusion(predict(batch), batch.label)}
                    for name, predict in work.predictors.items()
                }


@pytest.mark.parametrize(("floor", "least"), [("classes", 1 / 4), ("sites", 1 / 2)])
def test_the_floor_of_the_accuracy_is_chance_or_follows_the_number_of_sites(floor, least):
    server = new_server("ida", "ida.distance=false", "ida.accuracy=true", f"ida.floor='{floor}'")
    weights = weights_of(server, replies_of(server, [0.0, 0.0], accuracy=[0.1, 1.0]))
    assert weights == pytest.approx([1 / least, 1.0])
