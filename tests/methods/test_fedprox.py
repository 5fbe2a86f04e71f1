"""FedProx pulls local training back to the received model; without the pull it is FedAvg bit for bit."""

from __future__ import annotations

import pytest
import torch

from clients import SHORT, adjusted, new_client, new_server, noise_batch
from harness import all_state, assert_same_bits, run_tiny, server_state

ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")


@pytest.mark.parametrize("optimiser", [(), ADAM], ids=["sgd", "adam"])
def test_without_a_pull_it_is_fedavg_bit_for_bit(tmp_path, optimiser):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, *optimiser)
    limit = run_tiny(tmp_path / "fedprox", "fedprox", *SHORT, "fedprox.mu=0", *optimiser)
    assert_same_bits(all_state(plain), all_state(limit))


def test_gradients_are_those_of_the_loss_with_the_proximal_term():
    client = new_client("fedprox", "fedprox.mu=0.3")
    next(client.train({}))
    parameters = list(client.net.parameters())
    received = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            parameter.add_(0.01 * (index + 1))
    batch = noise_batch()
    loss = client.loss(batch, client.outputs(batch))
    found = adjusted(client, loss)
    distance = sum(((w - w_global) ** 2).sum() for w, w_global in zip(parameters, received))
    expected = torch.autograd.grad(loss + 0.3 / 2 * distance, parameters)
    for parameter, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[parameter], other)


def test_a_parameter_without_a_gradient_stays_without_one():
    client = new_client("fedprox")
    next(client.train({}))
    _, *others = client.net.parameters()
    found = client.adjust({parameter: torch.ones_like(parameter) for parameter in others})
    assert list(found) == others


def test_the_stronger_the_pull_the_less_a_round_moves_the_model(tmp_path):
    start = new_server("fedavg").state.model["head.weight"]
    moved = []
    for mu in (0.0, 10.0):
        folder = run_tiny(tmp_path / str(mu), "fedprox", f"fedprox.mu={mu}", "train.rounds=1")
        moved.append((server_state(folder)["model/head.weight"] - start).norm().item())
    assert moved[1] < 0.8 * moved[0]
