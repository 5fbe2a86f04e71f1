"""FedDyn's terms at the site and its correction on the server, each against the paper's formulas."""

from __future__ import annotations

import pytest
import torch

from clients import SHORT, adjusted, copied, kept_of, new_client, new_server, noise_batch
from equipoise.contract.protocol import Replies, Reply
from equipoise.nets import groups
from harness import all_state, assert_same_bits, events, run_tiny, server_state, site_sizes, with_lost_site

ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")
ALPHA = 0.2


def begun(alpha: float):
    """A client in a later round, and its linear term g, the gradient it remembers."""
    client = new_client("feddyn", f"feddyn.alpha={alpha}")
    draws = torch.Generator().manual_seed(1)
    slopes = [0.1 * torch.randn(p.shape, generator=draws) for p in client.net.parameters()]
    kept = {f"offset/{n}": g / alpha for (n, _), g in zip(client.net.named_parameters(), slopes)}
    client.workplace.begin({"model": copied(client.net.state_dict())}, kept)
    client.workplace.phases["main"].optimiser.lr.fill_(0.02)
    return client, slopes


@pytest.mark.parametrize("optimiser", [(), ADAM], ids=["sgd", "adam"])
def test_without_the_dynamic_terms_it_is_fedavg_bit_for_bit(tmp_path, optimiser):
    as_released = ("train.optimiser.clip=10", "train.optimiser.weight_decay=0.001")
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, *as_released, *optimiser)
    limit = run_tiny(tmp_path / "feddyn", "feddyn", *SHORT, "feddyn.alpha=0", *optimiser)
    assert_same_bits(all_state(plain), all_state(limit))


def test_gradients_are_those_of_the_loss_with_the_linear_and_the_quadratic_term():
    client, slopes = begun(ALPHA)
    parameters = list(client.net.parameters())
    received = [parameter.detach().clone() for parameter in parameters]
    next(client.train({}))
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            parameter.add_(0.01 * (index + 1))
    batch = noise_batch()
    loss = client.loss(batch, client.outputs(batch))
    found = adjusted(client, loss)
    linear = sum((g * w).sum() for g, w in zip(slopes, parameters))
    quadratic = sum(((w - w_global) ** 2).sum() for w, w_global in zip(parameters, received))
    expected = torch.autograd.grad(loss - linear + ALPHA / 2 * quadratic, parameters)
    for parameter, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[parameter], other, rtol=1e-4, atol=1e-6)


def test_after_training_the_linear_term_has_moved_by_alpha_times_the_drift():
    client, slopes = begun(ALPHA)
    received = [parameter.detach().clone() for parameter in client.net.parameters()]
    action = client.train({})
    next(action)
    for seed in range(3):
        client.step([noise_batch(seed=seed)], client.workplace.phases["main"])
    with pytest.raises(StopIteration):
        next(action)
    offsets = client.sides["dynamic"].offset.buffers()
    for offset, g, w, w_global in zip(offsets, slopes, client.net.parameters(), received, strict=True):
        torch.testing.assert_close(ALPHA * offset, g - ALPHA * (w.detach() - w_global), rtol=1e-4, atol=1e-6)


def assert_mean_of_sites(folder, weighting: str) -> None:
    """The server's correction is the mean of what sites keep; before a site ever trained that is zero."""
    sizes, state = site_sizes(), server_state(folder)
    weights = {site: sizes[site] if weighting == "size" else 1 for site in sizes}
    kept = {site: kept_of(folder, site, "offset") for site in sizes}
    for name in next(offset for offset in kept.values() if offset):
        mean = sum(weights[site] * offset[name] for site, offset in kept.items() if offset) / sum(weights.values())
        torch.testing.assert_close(state[f"correction/{name}"], mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_the_servers_correction_is_the_mean_of_what_all_sites_keep(tmp_path, weighting):
    """Two of three sites train in a round."""
    settings = ("train.rounds=3", "train.participation=0.7", f"train.aggregation='{weighting}'")
    assert_mean_of_sites(run_tiny(tmp_path, "feddyn", *settings), weighting)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_a_lost_site_leaves_the_mean_right(tmp_path, weighting):
    folder = run_tiny(tmp_path, with_lost_site("feddyn"), f"train.aggregation='{weighting}'", known_as="feddyn")
    assert list(events(folder, "round")[0]["missing"]) == ["site 2"]
    assert_mean_of_sites(folder, weighting)


def test_without_the_dynamic_terms_sites_are_not_asked_for_their_size():
    assert list(new_server("feddyn", "feddyn.alpha=0").start(("a", "b"))) == []


def test_the_server_takes_the_accumulated_drift_off_the_mean_but_not_off_statistics():
    """h <- h - alpha/m sum_k (w_k - w), w <- mean w_k - h/alpha, with two of m = 4 sites in each of two rounds."""
    server = new_server("feddyn", f"feddyn.alpha={ALPHA}", "train.aggregation='uniform'")
    assert list(server.start(("a", "b", "c", "d"))) == []
    statistics = set(groups(server.new_net())["statistics"])
    h = dict.fromkeys(server.state.correction, 0.0)
    for number in (1, 2):
        old = copied(server.state.model)
        conversation = server.round(number, ("a", "b"))
        next(conversation)
        models = {site: {name: t + shift for name, t in old.items()} for site, shift in (("a", 1), ("b", 3))}
        replies = Replies([Reply(site, {"model": model, "examples": 5}) for site, model in models.items()])
        with pytest.raises(StopIteration):
            conversation.send(replies)
        for name, tensor in server.state.model.items():
            mean = (models["a"][name] + models["b"][name]) / 2
            if name in statistics:
                torch.testing.assert_close(tensor, mean.to(tensor.dtype))
            else:
                h[name] = h[name] - ALPHA / 4 * (1 + 3)
                torch.testing.assert_close(tensor, mean - h[name] / ALPHA)


def test_steps_are_clipped_and_decayed_as_released_unless_the_user_says_otherwise():
    usual, own = new_server("feddyn").setting.config, new_server("feddyn", "train.optimiser.clip=3").setting.config
    assert (usual.train.optimiser.clip, usual.train.optimiser.weight_decay) == (10, 1e-3)
    assert (own.train.optimiser.clip, own.train.optimiser.weight_decay) == (3, 1e-3)
