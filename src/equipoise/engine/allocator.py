"""How the C library treats freed memory on a CPU: kept for the next step instead of given back to the system."""

from __future__ import annotations

import contextlib
import ctypes

#: of <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 28
#: the largest that glibc takes; greater tensors are mapped and returned one by one
LARGEST_ON_HEAP = 1 << 25


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees.

    By default it trims its heap whenever some MB lie free on top. Then every step faults its activations in again: an
    eighth of a small net's time. Elsewhere than on glibc nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP)
