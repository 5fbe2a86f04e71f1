"""pFedMe solves its inner problem and lets the global model follow; where it follows all the way, it is FedAvg."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, copied, kept_of, new_client, new_server, noise_batch
from equipoise.contract.protocol import Replies, Reply
from equipoise.nets import groups
from harness import all_state, assert_same_bits, events, run_tiny, server_state

PLAIN = ("pfedme.personal_lr=0.02",)


def test_one_inner_step_that_is_followed_all_the_way_is_fedavg_with_plain_descent(tmp_path):
    """With theta = w the pull is 0, and w - eta lambda (w - theta) is theta where eta lambda = 1."""
    whole = ("pfedme.inner_steps=1", "pfedme.regularisation=16", "pfedme.eta=0.0625")
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, "train.optimiser.lr=0.02", "train.optimiser.momentum=0")
    limit = run_tiny(tmp_path / "pfedme", "pfedme", *SHORT, *whole, *PLAIN)
    assert_same_bits(server_state(plain), server_state(limit))


def test_the_optimiser_of_other_methods_and_its_schedule_play_no_part(tmp_path):
    others = ("train.optimiser.name='adam'", "train.optimiser.lr=0.5", "train.optimiser.weight_decay=0.1")
    schedule = ("train.schedule.name='step'", "train.schedule.every=1", "train.schedule.gamma=0.1")
    usual = run_tiny(tmp_path / "usual", "pfedme", *SHORT)
    same = run_tiny(tmp_path / "same", "pfedme", *SHORT, *others, *schedule)
    assert_same_bits(all_state(usual), all_state(same))


def test_a_step_is_the_papers_two_levels_of_descent():
    client = new_client("pfedme", *PLAIN, "pfedme.inner_steps=3", "pfedme.regularisation=4", "pfedme.eta=0.1")
    client.workplace.set_mode(True, "eval")
    with torch.no_grad():
        for parameter in client.personal.parameters():
            parameter.add_(0.01)
    batch = noise_batch()
    reference = new_client("fedavg").net
    reference.load_state_dict(client.personal.state_dict())
    reference.eval()
    global_weights = [p.detach().clone() for p in client.net.parameters()]
    weights = list(reference.parameters())
    for _ in range(3):
        gradients = torch.autograd.grad(F.cross_entropy(reference(batch.image), batch.label), weights)
        with torch.no_grad():
            for theta, g, w in zip(weights, gradients, global_weights):
                theta.sub_(0.02 * (g + 4 * (theta - w)))
    client.step([batch], client.workplace.phases["main"])
    for found, theta in zip(client.personal.parameters(), weights):
        torch.testing.assert_close(found.detach(), theta.detach())
    for found, w, theta in zip(client.net.parameters(), global_weights, weights):
        torch.testing.assert_close(found.detach(), (w - 0.1 * 4 * (w - theta)).detach())


def residual(client, batch) -> tuple[float, float]:
    """|grad f(theta) + lambda (theta - w)| and |grad f(theta)|: at the inner optimum the first is 0."""
    parameters = list(client.personal.parameters())
    gradients = list(torch.autograd.grad(client.loss(batch, client.outputs(batch)), parameters))
    adjusted = client.adjust(dict(zip(parameters, gradients, strict=True)))
    both = [adjusted[parameter] for parameter in parameters], gradients
    norms = [torch.stack([g.norm() for g in some]).norm().item() for some in both]
    return norms[0], norms[1]


def test_more_inner_steps_come_closer_to_the_inner_optimum():
    """eta is so small that w stands still."""
    batch, shares = noise_batch(), []
    for inner in (1, 20):
        client = new_client("pfedme", *PLAIN, f"pfedme.inner_steps={inner}", "pfedme.eta=1e-9")
        client.workplace.set_mode(True, "eval")
        client.step([batch], client.workplace.phases["main"])
        left, pushing = residual(client, batch)
        shares.append(left / pushing)
    assert shares[0] > 0.5 and shares[1] < 0.05


def test_a_round_starts_at_the_global_model_and_sends_its_follower():
    client = new_client("pfedme")
    with torch.no_grad():
        client.personal.head.weight.fill_(9.0)
    action = client.train({})
    next(action)
    assert_same_bits(copied(client.personal.state_dict()), copied(client.net.state_dict()))
    client.step([noise_batch()], client.workplace.phases["main"])
    with pytest.raises(StopIteration) as stop:
        next(action)
    sent = stop.value.value["model"]
    statistics = groups(client.net)["statistics"]
    assert_same_bits({n: sent[n] for n in statistics}, {n: client.personal.state_dict()[n] for n in statistics})
    assert torch.equal(sent["head.weight"], client.net.head.weight)
    assert not torch.equal(sent["head.weight"], client.personal.head.weight)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_the_server_moves_by_beta_towards_the_mean_and_takes_the_mean_of_statistics(beta):
    server = new_server("pfedme", f"pfedme.beta={beta}")
    old = copied(server.state.model)
    conversation = server.round(1, ("a", "b"))
    next(conversation)
    models = [{name: tensor + shift for name, tensor in old.items()} for shift in (1, 3)]
    with pytest.raises(StopIteration):
        conversation.send(Replies([Reply(s, {"model": m, "examples": 5}) for s, m in zip("ab", models)]))
    statistics = set(groups(server.new_net())["statistics"])
    for name, tensor in server.state.model.items():
        step = 2 if name in statistics else beta * 2
        torch.testing.assert_close(tensor, old[name] + step)


def test_the_personal_model_is_the_one_that_stays(tmp_path):
    folder = run_tiny(tmp_path, "pfedme", *SHORT)
    one, two = (kept_of(folder, site, "personal") for site in ("site 1", "site 2"))
    assert not torch.equal(one["head.weight"], two["head.weight"])
    assert {e["view"] for e in events(folder, "final")} == {"global", "personal"}
    client = new_client("pfedme")
    client.personal.load_state_dict(one)
    client.workplace.set_mode(False)
    batch = noise_batch()
    assert torch.equal(client.predict("personal", batch), client.personal(batch.image))
    assert torch.equal(client.predict("global", batch), client.net(batch.image))
