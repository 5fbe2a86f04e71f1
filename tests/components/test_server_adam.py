"""Server Adam: running means of the sites' mean changes and of their squares, without bias correction."""

from __future__ import annotations

import math

from clients import assert_steps, new_server, with_component


def test_two_steps_by_hand():
    """Changes 2 and 4: m = 1, 2.5 and v = 0.25 * 4 = 1, 0.75 * 1 + 0.25 * 16 = 4.75; steps 0.1 m / (sqrt(v) + 0.5)."""
    server = new_server("fedavg", *with_component("server-adam", lr=0.1, beta=0.5, beta2=0.75, tau=0.5))
    assert_steps(server, (2, 4), (0.1 * 1 / 1.5, 0.1 * 2.5 / (math.sqrt(4.75) + 0.5)))
