"""Recording a step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record what is issued within, on the current stream, which must not be the default one.

    Unlike `torch.cuda.graph` it leaves cached memory where it is: the next user of freed memory would have to wait.
    """
    torch.cuda.synchronize()
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # the end of a broken recording fails too, and would hide what broke it
            graph.capture_end()
        raise
    graph.capture_end()
