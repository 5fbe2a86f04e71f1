"""SCAFFOLD's variates on both sides: what they are, how they correct steps, and where nothing is left to correct."""

from __future__ import annotations

import pytest
import torch

from clients import copied, kept_of, new_client, new_server, noise_batch
from equipoise.contract.protocol import Replies, Reply
from equipoise.nets import groups
from harness import assert_same_bits, events, run_tiny, server_state, site_sizes, with_lost_site

PLAIN = ("train.optimiser.momentum=0", "train.optimiser.lr=0.05")
ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")
SITES = ("site 1", "site 2", "site 3")


def model_of(folder) -> dict[str, torch.Tensor]:
    return {name: t for name, t in server_state(folder).items() if name.startswith("model/")}


def variates_like(client, scale: float, seed: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(p.shape, generator=draws) for n, p in client.net.named_parameters()}


def begun(client, common, own) -> None:
    """Let the client begin a round with these variates and the net's present weights."""
    kept = {f"own_variate/{name}": value for name, value in own.items()}
    client.workplace.begin({"model": copied(client.net.state_dict()), "variate": common}, kept)
    for phase in client.workplace.phases.values():
        phase.optimiser.lr.fill_(phase.optimiser.config.lr)


# ---- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", [(), ADAM], ids=["sgd", "adam"])
def test_a_site_alone_has_nothing_to_correct_and_trains_as_in_fedavg(tmp_path, optimiser):
    alone = ("data.phantom.sites=1", "data.phantom.images=60", "train.rounds=3", *optimiser)
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *alone)
    limit = run_tiny(tmp_path / "scaffold", "scaffold", *alone)
    assert_same_bits(model_of(plain), model_of(limit))
    assert server_state(limit)["variate/head.weight"].any()


def test_the_first_round_knows_no_gradients_and_is_fedavgs(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", "train.rounds=1")
    limit = run_tiny(tmp_path / "scaffold", "scaffold", "train.rounds=1")
    assert_same_bits(model_of(plain), model_of(limit))


# ---- variates ----------------------------------------------------------------------------------------


def mean_of_sites(folder, weights) -> dict[str, torch.Tensor]:
    """Mean over all sites of their own variates; a site that never trained has zeros."""
    own = [kept_of(folder, site, "own_variate") for site in SITES]
    names = next(variate for variate in own if variate)
    total = sum(weights)
    return {n: sum(w * v[n] for w, v in zip(weights, own) if v) / total for n in names}


def assert_mean_of_sites(folder, weighting: str) -> None:
    """The server's variate is the mean of what sites keep, by their number of images or all alike."""
    sizes, state = site_sizes(), server_state(folder)
    assert len(set(sizes.values())) > 1
    weights = [sizes[site] if weighting == "size" else 1 for site in SITES]
    for name, mean in mean_of_sites(folder, weights).items():
        torch.testing.assert_close(state[f"variate/{name}"], mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
@pytest.mark.parametrize("participation", [1.0, 0.7])
def test_the_common_variate_is_the_mean_of_the_sites_own(tmp_path, participation, weighting):
    """At 0.7 two of three sites train in a round, one of them perhaps late."""
    settings = (f"train.participation={participation}", f"train.aggregation='{weighting}'")
    assert_mean_of_sites(run_tiny(tmp_path, "scaffold", "train.rounds=3", *settings), weighting)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_a_lost_site_leaves_the_mean_right(tmp_path, weighting):
    folder = run_tiny(tmp_path, with_lost_site("scaffold"), f"train.aggregation='{weighting}'", known_as="scaffold")
    assert list(events(folder, "round")[0]["missing"]) == ["site 2"]
    assert_mean_of_sites(folder, weighting)


def test_by_size_all_sites_tell_theirs_once_and_alike_none_does():
    server = new_server("scaffold")
    conversation = server.start(("a", "b", "c"))
    assert (ask := next(conversation)).action == "count" and ask.sites == ("a", "b", "c")
    replies = [Reply(site, {"examples": size}) for site, size in (("a", 30), ("b", 40), ("c", 50))]
    with pytest.raises(StopIteration):
        conversation.send(Replies(replies))
    assert server.sides["control-variates"].participation(Replies(replies[::2])) == pytest.approx(80 / 120)
    alike = new_server("scaffold", "train.aggregation='uniform'")
    assert list(alike.start(("a", "b", "c"))) == []
    assert alike.sides["control-variates"].participation(Replies(replies[::2])) == pytest.approx(2 / 3)


@pytest.mark.parametrize("lr", [0.05, 0.02], ids=["base rate", "decayed rate"])
def test_under_plain_descent_the_own_variate_follows_option_ii_of_the_paper(lr):
    client = new_client("scaffold", *PLAIN)
    common, own = variates_like(client, 0.02, 1), variates_like(client, 0.02, 2)
    begun(client, common, own)
    client.workplace.phases["main"].optimiser.lr.fill_(lr)
    start = copied(dict(client.net.named_parameters()))
    action = client.train({})
    next(action)
    for seed in range(3):
        client.step([noise_batch(seed=seed)], client.workplace.phases["main"])
    with pytest.raises(StopIteration) as stop:
        next(action)
    change = stop.value.value["variate_change"]
    own_variate = client.sides["control-variates"].own.state_dict()
    for name, end in client.net.named_parameters():
        new = own[name] - common[name] + (start[name] - end.detach()) / (3 * lr)
        torch.testing.assert_close(own_variate[name], new, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(change[name], new - own[name], rtol=1e-4, atol=1e-5)


def test_momentum_does_not_inflate_the_variates():
    """By its displacement a site under momentum 0.9 would take its gradient for up to ten times what it is."""
    client = new_client("scaffold", "train.optimiser.lr=1e-6")
    zeros = {name: torch.zeros_like(p) for name, p in client.net.named_parameters()}
    begun(client, zeros, zeros)
    client.workplace.set_mode(True, "eval")
    batch, parameters = noise_batch(), list(client.net.parameters())
    gradients = torch.autograd.grad(client.loss(batch, client.outputs(batch)), parameters)
    action = client.train({})
    next(action)
    for _ in range(20):
        client.step([batch], client.workplace.phases["main"])
    with pytest.raises(StopIteration):
        next(action)
    for found, gradient in zip(client.sides["control-variates"].own.buffers(), gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-2, atol=1e-4)


# ---- steps -------------------------------------------------------------------------------------------


def test_a_step_takes_the_gradient_less_the_sites_own_variate_plus_the_common_one():
    client = new_client("scaffold")
    common, own = variates_like(client, 1.0, 1), variates_like(client, 1.0, 2)
    begun(client, common, own)
    next(client.train({}))
    slopes = variates_like(client, 1.0, 3)
    found = client.adjust({parameter: slopes[name] for name, parameter in client.net.named_parameters()})
    for name, parameter in client.net.named_parameters():
        torch.testing.assert_close(found[parameter], slopes[name] - own[name] + common[name])


def test_the_server_step_goes_part_of_the_way_and_takes_the_mean_of_statistics():
    server = new_server("scaffold", "scaffold.server_lr=0.5", "train.aggregation='uniform'")
    assert list(server.start(("a", "b", "c", "d"))) == []
    old, variate = copied(server.state.model), copied(server.state.variate)
    conversation = server.round(1, ("a", "b"))
    assert next(conversation).payload.keys() == {"model", "variate"}
    replies = [
        Reply(
            site,
            {
                "model": {name: t + shift for name, t in old.items()},
                "variate_change": {name: t + shift for name, t in variate.items()},
                "examples": 5,
            },
        )
        for site, shift in (("a", 1), ("b", 3))
    ]
    with pytest.raises(StopIteration):
        conversation.send(Replies(replies))
    statistics = set(groups(server.new_net())["statistics"])
    for name, tensor in server.state.model.items():
        torch.testing.assert_close(tensor, old[name] + (2 if name in statistics else 1))
    for tensor in server.state.variate.values():  # two of four sites changed theirs by 2 on average
        torch.testing.assert_close(tensor, torch.ones_like(tensor))
