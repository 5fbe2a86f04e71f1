"""A step of the server's own training, run many times: on a GPU captured once and replayed, elsewhere a plain loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from equipoise.contract.capture import recorded
from equipoise.core.errors import first_line

log = logging.getLogger(__name__)

WARM_UP_STEPS = 2


class Repeated:
    """Repeats one step, which takes nothing and changes tensors in place that stay where they are.

    What it draws, if anything, comes from `random`. The graph is kept for later calls, which must bring the same step.
    The step itself is not kept, so that its owner can be freed. Steps that warm up are the first of those
    asked for: nothing has to be put back.
    """

    def __init__(self, device: torch.device, random: torch.Generator | None = None, capture: bool = True):
        self.random = random
        self._capture_next = capture and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def captured(self) -> bool:
        """Whether steps are replayed."""
        return self._graph is not None

    def __call__(self, step: Callable[[], None], times: int) -> None:
        """Run the step so many times."""
        if self._capture_next and times > WARM_UP_STEPS:
            self._warm_up_and_capture(step)
            times -= WARM_UP_STEPS
        again = step if self._graph is None else self._graph.replay
        for _ in range(times):
            again()

    def _warm_up_and_capture(self, step: Callable[[], None]) -> None:
        self._capture_next = False
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        drawn = None if self.random is None else self.random.get_state()
        try:
            with _spare_default_generator(), torch.cuda.stream(side):
                if self.random is not None:
                    graph.register_generator_state(self.random)
                with recorded(graph):
                    step()
            self._graph = graph
        except RuntimeError as problem:
            if self.random is not None and drawn is not None:
                # A broken recording leaves the generator's state recording: go on with another.
                self.random.graphsafe_set_state(self.random.clone_state())
                self.random.set_state(drawn)
            log.warning("the server's steps run eagerly: %s", first_line(problem))


@contextmanager
def _spare_default_generator() -> Iterator[None]:
    """Give a recording an unused default random stream. Replays touch it, and the present stream may belong to a
    working slot."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    present = default.graphsafe_get_state()
    default.graphsafe_set_state(default.clone_state())
    try:
        yield
    finally:
        default.graphsafe_set_state(present)
