"""A step of the server's own training, run many times: on a GPU captured once and replayed, elsewhere a plain loop."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

WARM_UP_STEPS = 2


class Repeated:
    """Repeats `step`, which takes nothing and changes tensors in place that stay where they are.

    What it draws comes from `random`, on whose device it works; the graph is kept for the next calls. The steps that
    warm up are the first of those asked for, so that nothing has to be put back.
    """

    def __init__(self, step: Callable[[], None], random: torch.Generator, capture: bool = True):
        self.step = step
        self.random = random
        self._capture_next = capture and random.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, times: int) -> None:
        """Run the step so many times."""
        if self._capture_next and times > WARM_UP_STEPS:
            self._warm_up_and_capture()
            times -= WARM_UP_STEPS
        again = self.step if self._graph is None else self._graph.replay
        for _ in range(times):
            again()

    def _warm_up_and_capture(self) -> None:
        self._capture_next = False
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph.register_generator_state(self.random)
        drawn = self.random.get_state()
        try:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self.step()
            self._graph = graph
        except RuntimeError as problem:
            self.random.set_state(drawn)
            log.warning("the server's steps run eagerly: %s", str(problem).splitlines()[0])
