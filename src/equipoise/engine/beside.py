"""Work of the server beside an evaluation that other processes do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch


@contextmanager
def beside(work: Sequence[Callable[[], None]], threads: int) -> Iterator[None]:
    """Do work in a thread while the block waits for other processes; all of it is done after the block."""
    if not work:
        yield
        return
    with ThreadPoolExecutor(1, "beside", initializer=partial(torch.set_num_threads, threads)) as pool:
        begun = [pool.submit(piece) for piece in work]
        yield
        for piece in begun:
            piece.result()
