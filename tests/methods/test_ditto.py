"""Ditto's personal nets are held to the received net; its global net is FedAvg's."""

from __future__ import annotations

import torch

from clients import SHORT, kept_of, new_client, noise_batch
from harness import assert_same_bits, run_tiny, server_state


def test_the_global_net_is_fedavgs_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT)
    ditto = run_tiny(tmp_path / "ditto", "ditto", *SHORT)
    assert_same_bits(server_state(plain), server_state(ditto))


def test_without_the_pull_personal_nets_learn_alone_bit_for_bit(tmp_path):
    local = run_tiny(tmp_path / "local", "local", *SHORT)
    ditto = run_tiny(tmp_path / "ditto", "ditto", *SHORT, "ditto.regularisation=0")
    assert_same_bits(kept_of(local, "site 1", "net"), kept_of(ditto, "site 1", "personal"))


def test_the_stronger_the_pull_the_nearer_personal_nets_stay(tmp_path):
    def distance(pull: float) -> float:
        folder = run_tiny(tmp_path / str(pull), "ditto", *SHORT, f"ditto.regularisation={pull}")
        personal, model = kept_of(folder, "site 1", "personal"), server_state(folder)
        return sum(
            float((t - model[f"model/{n}"]).norm()) for n, t in personal.items() if n.endswith(("weight", "bias"))
        )

    assert distance(10.0) < distance(1.0) < distance(0.0)


def test_gradients_of_the_personal_net_get_the_pull_and_no_others_do():
    client, batch = new_client("ditto", "ditto.regularisation=0.5"), noise_batch()
    client.copy(client.net, client.received)
    with torch.no_grad():
        for parameter in client.personal.parameters():
            parameter.add_(2.0)
        for parameter in client.net.parameters():
            parameter.add_(7.0)  # has trained on: the pull is to what was received
    parameters = [*client.net.parameters(), *client.personal.parameters()]
    found = torch.autograd.grad(client.loss(batch, client.outputs(batch)), parameters)
    adjusted = client.adjust(dict(zip(parameters, found)))
    received = dict(client.received.named_buffers())
    for parameter, gradient in zip(client.net.parameters(), found):
        assert torch.equal(adjusted[parameter], gradient)
    for (name, parameter), gradient in zip(client.personal.named_parameters(), found[len(found) // 2 :]):
        torch.testing.assert_close(adjusted[parameter], gradient + 0.5 * (parameter.detach() - received[name]))
