"""Server Adagrad: the running square is the sum of all squared changes."""

from __future__ import annotations

import math

from clients import assert_steps, new_server, with_component


def test_two_steps_by_hand():
    """Changes 2 and 4: v = 4, then 4 + 16 = 20; m = 1, 2.5; steps 0.1 m / (sqrt(v) + 0.5)."""
    server = new_server("fedavg", *with_component("server-adagrad", lr=0.1, beta=0.5, tau=0.5))
    assert_steps(server, (2, 4), (0.1 * 1 / 2.5, 0.1 * 2.5 / (math.sqrt(20) + 0.5)))
