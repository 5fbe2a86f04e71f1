"""Server Yogi: the running square moves towards the squared change by a share of that, not of their difference."""

from __future__ import annotations

import math

from clients import assert_steps, new_server, with_component


def test_two_steps_by_hand():
    """Changes 4 and 1: v = 0 + 0.25 * 16 = 4, then 4 - 0.25 * 1 = 3.75; m = 2, 1.5; steps 0.1 m / (sqrt(v) + 0.5)."""
    server = new_server("fedavg", *with_component("server-yogi", lr=0.1, beta=0.5, beta2=0.75, tau=0.5))
    assert_steps(server, (4, 1), (0.1 * 2 / 2.5, 0.1 * 1.5 / (math.sqrt(3.75) + 0.5)))
