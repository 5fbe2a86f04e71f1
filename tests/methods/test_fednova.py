"""FedNova counts what sites send by the step; where all sites take as many steps it is FedAvg bit for bit."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from clients import SHORT, copied, new_client, new_server
from equipoise.contract.protocol import Replies, Reply
from equipoise.nets import groups
from harness import all_state, assert_same_bits, run_tiny


def test_with_as_many_steps_everywhere_it_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, "train.steps=3")
    limit = run_tiny(tmp_path / "fednova", "fednova", *SHORT, "train.steps=3")
    assert_same_bits(all_state(plain), all_state(limit))


def test_with_other_numbers_of_steps_it_is_not(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT)
    nova = run_tiny(tmp_path / "fednova", "fednova", *SHORT)
    pairs = zip(all_state(plain).values(), all_state(nova).values())
    assert any(not torch.equal(one, other) for one, other in pairs)


def test_the_global_step_is_the_mean_of_normalised_steps():
    """w + tau_eff sum p_i (w_i - w) / a_i, tau_eff = sum p_i a_i; running statistics take the plain mean."""
    server = new_server("fednova")
    old = copied(server.state.model)
    sites = ((1.0, 2.0, 30), (3.0, 8.0, 10))  # change, steps, images
    replies = [
        Reply(str(i), {"model": {n: t + c for n, t in old.items()}, "examples": k, "steps": a})
        for i, (c, a, k) in enumerate(sites)
    ]
    conversation = server.round(1, ("0", "1"))
    next(conversation)
    with suppress(StopIteration):
        conversation.send(Replies(replies))
    effective = 0.75 * 2 + 0.25 * 8
    step = effective * (0.75 * 1 / 2 + 0.25 * 3 / 8)
    statistics = set(groups(server.new_net())["statistics"])
    for name, new in server.state.model.items():
        if not name.endswith("num_batches_tracked"):
            wanted = 0.75 * 1 + 0.25 * 3 if name in statistics else step
            torch.testing.assert_close(new - old[name], torch.full_like(new, wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("momentum", "keep", "decayed"), [(0.0, False, False), (0.9, True, False), (0.9, False, True)])
def test_steps_under_momentum_count_by_the_gradients_that_they_carry(momentum, keep, decayed):
    client = new_client(
        "fednova",
        "train.optimiser.name='sgd'",
        f"train.optimiser.momentum={momentum}",
        f"train.optimiser.keep={str(keep).lower()}",
    )
    length = client.sides["normalised-steps"].length(5.0)
    if not decayed:
        assert length == 5
        return
    factors = [sum(0.9**power for power in range(5 - step)) for step in range(5)]  # what each gradient moves in all
    assert length == pytest.approx(sum(factors))
