"""FedALA: the weights that mix received and own parameters, and how a site learns them."""

from __future__ import annotations

import torch

from clients import new_client, noise_batch
from harness import run_tiny, site_states


def prepared(*settings):
    """A client whose received and own heads differ."""
    client = new_client("fedala", *settings)
    with torch.no_grad():
        for parameter in client.personal.parameters():
            parameter.add_(0.1)
        for name in client.mixed:
            client.received[name].copy_(dict(client.net.named_parameters())[name])
    return client


def test_weights_of_1_start_from_the_received_model_and_weights_of_0_from_the_own():
    client = prepared()
    for weight, source in ((1.0, client.received), (0.0, dict(client.personal.named_parameters()))):
        for name in client.mixed:
            client.share_of[name].fill_(weight)
        client.set_mixture()
        assert all(dict(client.net.named_parameters())[name].equal(source[name]) for name in client.mixed)


def test_a_step_moves_weights_down_the_slope_of_the_mixture_within_0_and_1():
    client = prepared()
    for name in client.mixed:
        client.share_of[name].fill_(0.5)
    client.set_mixture()
    batch = noise_batch()
    head = client.net.head.weight
    (slope,) = torch.autograd.grad(client.loss(batch, client.forward(batch)), [head])
    apart = client.received["head.weight"] - client.personal.head.weight
    wanted = (0.5 - slope * apart).clamp(0, 1)
    client.step([batch], client.workplace.phases["weights"])
    torch.testing.assert_close(client.share_of["head.weight"], wanted.detach())
    mixture = torch.lerp(client.personal.head.weight, client.received["head.weight"], wanted)
    torch.testing.assert_close(client.net.head.weight, mixture.detach())


def test_only_the_head_is_mixed_by_default():
    assert prepared().mixed == ["head.weight", "head.bias"]
    assert len(prepared("fedala.mixed=all").mixed) == len(list(prepared().net.parameters()))


def test_a_site_learns_weights_from_its_second_round_on(tmp_path):
    def stage(rounds):
        folder = run_tiny(tmp_path / str(rounds), "fedala", f"train.rounds={rounds}", "fedala.most_epochs=2")
        return {int(value) for name, value in site_states(folder).items() if name.endswith("stage/")}

    assert stage(1) == {1} and stage(2) == {2}


def test_a_share_of_the_images_is_drawn_while_weights_are_learnt():
    client = prepared("fedala.share=0.5")
    everything = client.workplace.order(torch.zeros(40), torch.Generator())
    client.learning = True
    assert len(everything) == 40 and len(client.workplace.order(torch.zeros(40), torch.Generator())) == 20
