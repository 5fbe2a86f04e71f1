"""Server momentum: a running sum of the sites' mean changes moves the model; without momentum it is FedAvg."""

from __future__ import annotations

import pytest

from clients import SHORT, assert_steps, new_server, with_component
from harness import all_state, assert_same_bits, run_tiny

ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")


@pytest.mark.parametrize("optimiser", [(), ADAM], ids=["sgd", "adam"])
def test_without_momentum_a_step_of_one_is_fedavg_bit_for_bit(tmp_path, optimiser):
    plain = run_tiny(tmp_path / "plain", "fedavg", *SHORT, *optimiser)
    limit = run_tiny(
        tmp_path / "limit", "fedavg", *SHORT, *optimiser, *with_component("server-momentum", momentum=0, lr=1)
    )
    assert_same_bits(all_state(plain), all_state(limit))


def test_the_velocity_gathers_changes():
    """Changes 2, 1 and 0: v = 2, 0.5 * 2 + 1 = 2, 0.5 * 2 = 1; the model moves by 0.25 v."""
    server = new_server("fedavg", *with_component("server-momentum", momentum=0.5, lr=0.25))
    assert_steps(server, (2, 1, 0), (0.5, 0.5, 0.25))


def test_without_momentum_the_model_goes_a_share_of_the_way():
    server = new_server("fedavg", *with_component("server-momentum", momentum=0, lr=0.25))
    assert_steps(server, (2, 4), (0.5, 1.0))
    assert not any(name.startswith("server-momentum") for name in server.state.snapshot())
