"""How kernels deal out the channels of channels-last images: what all of them have in common."""

from __future__ import annotations

import triton

#: channels are counted in groups of 8 where they can be: what a thread reads at once
GROUP = 8


def channel_groups(channels: int) -> tuple[int, int]:
    """How many groups channels make, and of how many channels each is."""
    size = GROUP if channels % GROUP == 0 else 1
    return channels // size, size


def channel_width(channels: int) -> int:
    """Channels that one program takes."""
    return min(max(triton.next_power_of_2(channels), 32), 64)
