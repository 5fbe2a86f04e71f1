"""The GPU engine: several sites train at once, each on a slot with its own stream and captured steps.

Medical federations train small batches, so a GPU that is fed step by step waits for launches. A slot is a model replica
with its optimiser, static input buffers and one CUDA graph per kind of step. All slots issue their steps in turn, each
on its slot's stream. Nets, moments and graphs are held per slot, however many sites there are;
images and the replies of an ask stay on the device too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from equipoise.contract.capture import recorded
from equipoise.contract.method import Batch, Client
from equipoise.contract.protocol import Ask, SiteFailure
from equipoise.core.errors import first_line
from equipoise.engine.slot import EVALUATE, Outcome, Request, Slot
from equipoise.engine.training import eager_step

log = logging.getLogger(__name__)

#: a short batch of some shape is captured once it has been seen this often
SEEN_BEFORE_CAPTURE = 3
#: captured kinds of step per slot
MOST_GRAPHS = 12
#: eager steps before a capture: the first slot's find the kernels, another slot's make sure that all is in place
FIRST_WARM_UP_STEPS, LATER_WARM_UP_STEPS = 2, 1
#: share of the free memory that slots may take, and how many are of use
MEMORY_SHARE = 0.8
MOST_SLOTS = 16


class Captured:
    """One kind of step as a CUDA graph, with the buffers that it reads."""

    def __init__(self, graph: torch.cuda.CUDAGraph, batches: list[Batch]):
        self.graph = graph
        self.inputs = [tensor for batch in batches for tensor in vars(batch).values()]

    def replay(self, batches: list[Batch]) -> None:
        """Run the step on other batches of the same shapes."""
        torch._foreach_copy_(self.inputs, [tensor for batch in batches for tensor in vars(batch).values()])
        self.graph.replay()


class WarmUp:
    """Eager steps before a capture. All slots take them on one stream, so that they use the same memory in turn."""

    def __init__(self) -> None:
        self.known: set[Any] = set()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Where they run."""
        return torch.cuda.Stream()

    def __call__(self, key: Any, step: Callable[[], None]) -> None:
        """Run a step of this kind as often as it needs."""
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                for _ in range(LATER_WARM_UP_STEPS if key in self.known else FIRST_WARM_UP_STEPS):
                    step()
        finally:  # later work waits for the issued work
            torch.cuda.current_stream().wait_stream(self.stream)
        self.known.add(key)


class CapturedSteps:
    """Runs the steps of one slot: replayed where their shape is known, eagerly otherwise."""

    def __init__(self, stream: torch.cuda.Stream, warm_up: WarmUp, enabled: bool = True):
        self.stream = stream
        self.warm_up = warm_up
        self.enabled = enabled
        self.generator = torch.cuda.default_generators[torch.cuda.current_device()].clone_state()
        self.seconds = 0.0
        self.stepped = False
        self._graphs: dict[Any, Captured] = {}
        self._seen: dict[Any, int] = {}
        self._pool: Any = None

    def seed(self, value: int) -> None:
        """Start the random stream of dropout; captured steps draw from it too."""
        self.generator.manual_seed(value)

    def use_generator(self) -> None:
        """Make this slot's random stream the default for the work that follows."""
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(self.generator)

    def __call__(self, client: Client, phase: str, batches: list[Batch], loss_sum: Tensor) -> None:
        self.stepped = True
        key = (phase, client.workplace.norm_mode, *(_shapes(batch) for batch in batches))
        if key not in self._graphs and not self._worth_capturing(key, client, batches):
            eager_step(client, phase, batches, loss_sum)
            return
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture_with_room(key, client, phase, batches, loss_sum)
            except RuntimeError as problem:  # what cannot be captured, or does not fit, runs eagerly
                self.enabled = False
                log.warning("steps of %s run eagerly: %s", type(client).__name__, first_line(problem))
                eager_step(client, phase, batches, loss_sum)
                return
        self._graphs[key].replay(batches)

    def _worth_capturing(self, key: Any, client: Client, batches: list[Batch]) -> bool:
        if not self.enabled or len(self._graphs) >= MOST_GRAPHS:
            return False
        if client.workplace.private is not None:  # a site's noise and budget are none of the graph's tensors
            return False
        self._seen[key] = self._seen.get(key, 0) + 1
        full = all(len(batch.label) == client.setting.config.train.batch_size for batch in batches)
        return full or self._seen[key] > SEEN_BEFORE_CAPTURE

    def _capture_with_room(
        self, key: Any, client: Client, phase: str, batches: list[Batch], loss_sum: Tensor
    ) -> Captured:
        """Capture; where memory runs out, once more after cached memory was given back, which a capture cannot do."""
        try:
            return self._capture(key, client, phase, batches, loss_sum)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return self._capture(key, client, phase, batches, loss_sum)

    def _capture(self, key: Any, client: Client, phase: str, batches: list[Batch], loss_sum: Tensor) -> Captured:
        """Warm up on throw-away values, put everything back, and record the step."""
        static = [Batch(**{name: t.clone() for name, t in vars(batch).items()}) for batch in batches]
        tensors = [*client.workplace.tensors(), loss_sum]
        before = [tensor.detach().clone() for tensor in tensors]
        state = self.generator.get_state()
        began = torch.cuda.Event(enable_timing=True)
        began.record()
        graph = torch.cuda.CUDAGraph()

        def step() -> None:
            eager_step(client, phase, static, loss_sum)

        try:
            self.warm_up(key, step)
            with recorded(graph, self._pool):
                step()
            self._pool = self._pool or graph.pool()
        finally:  # also when it cannot be captured: the eager step then starts from the right values
            with torch.no_grad():
                torch._foreach_copy_(tensors, before)
            self.generator.set_state(state)
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        ended.synchronize()
        self.seconds += began.elapsed_time(ended) / 1e3
        return Captured(graph, static)


def _shapes(batch: Batch) -> tuple[Any, ...]:
    return tuple((name, tuple(tensor.shape)) for name, tensor in vars(batch).items())


#: those of all runs that share this process
GPU_PLACES: WeakSet[GpuPlace] = WeakSet()


class GpuPlace:
    """Runs requests on as many slots as fit, steps issued in turn."""

    def __init__(self, engine: Any, new_slot: Callable[[CapturedSteps], Slot]):
        self.engine = engine
        self.new_slot = new_slot
        self.slots: list[Slot] = []
        self.homes: dict[str, Slot] = {}
        self._cleared = 0
        GPU_PLACES.add(self)
        self.warm_up = WarmUp()
        self.wanted = engine.setting.config.compute.slots
        _set_precision(engine.setting.config.compute)

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Generator[None, None, list[Any]]:
        """Perform all requests; outcomes in the order of the requests."""
        outcomes: dict[int, Outcome | SiteFailure] = {}
        waiting = self._longest_first(requests)
        active: list[tuple[Slot, int, Iterator[None]]] = []
        while waiting or active:
            while waiting and (slot := self._free_slot(active, waiting)) is not None:
                index, request = waiting.pop(0)
                if request.action != EVALUATE:
                    self.homes[request.site] = slot
                _stream(slot).wait_stream(torch.cuda.current_stream())
                active.append((slot, index, self._perform(slot, request, ask)))
            for entry in list(active):
                slot, index, work = entry
                with torch.cuda.stream(_stream(slot)):
                    slot.run_step.use_generator()  # type: ignore[attr-defined]
                    try:
                        next(work)
                        continue
                    except StopIteration as stop:
                        outcomes[index] = stop.value
                    except SiteFailure as failure:
                        outcomes[index] = failure
                active.remove(entry)
                self._keep(requests[index], outcomes[index], version)
            yield
        for slot in self.slots:
            torch.cuda.current_stream().wait_stream(_stream(slot))
        return [outcomes[index] for index in range(len(requests))]

    def _longest_first(self, requests: Sequence[Request]) -> list[tuple[int, Request]]:
        """Requests with their places, sites with the most images ahead: the round ends with the last of them."""
        images = [sum(map(len, self.engine.data(request.site).site.splits.values())) for request in requests]
        return sorted(enumerate(requests), key=lambda entry: -images[entry[0]])

    def _perform(self, slot: Slot, request: Request, ask: Ask) -> Generator[None, None, Outcome]:
        engine = self.engine
        kept = engine.states.load(request.site)
        elsewhere = engine.data(request.data) if request.data else None
        return slot.perform(request, ask.message(request.site), kept, engine.data(request.site), elsewhere)

    def _keep(self, request: Request, outcome: Outcome | SiteFailure, version: str) -> None:
        if isinstance(outcome, Outcome) and outcome.kept is not None:
            self.engine.states.put(request.site, version, outcome.kept)
            outcome.kept = None

    def _free_slot(
        self, active: Sequence[tuple[Slot, int, Iterator[None]]], waiting: Sequence[tuple[int, Request]]
    ) -> Slot | None:
        """A slot for the first of those waiting, if one is free or fits.

        A site takes the slot that it had before, where its short last batch may be captured; else one that no other
        waiting site had.
        """
        free = [slot for slot in self.slots if all(slot is not busy for busy, _, _ in active)]
        own, *others = [self.homes.get(request.site) for _, request in waiting]
        if own in free:
            return own
        if free:
            return next((slot for slot in free if slot not in others), free[0])
        return self._new_slot() if self._room() else None

    def _new_slot(self) -> Slot:
        # The first slots take the longest work: where kernels compete, theirs go first.
        lowest, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        stream = torch.cuda.Stream(priority=min(highest + len(self.slots), lowest))
        steps = CapturedSteps(stream, self.warm_up, self.engine.setting.config.compute.capture)
        self.slots.append(self.new_slot(steps))
        return self.slots[-1]

    def _room(self) -> bool:
        """Whether another slot fits: as many as asked for, or as the memory of those so far allows."""
        if not self.slots or self.wanted:
            return len(self.slots) < (self.wanted or 1)
        if len(self.slots) >= MOST_SLOTS or not all(slot.run_step.stepped for slot in self.slots):  # type: ignore[attr-defined]
            return False
        if _another_fits():
            return True
        if self._cleared < len(self.slots):  # memory that is only cached, by runs that have ended, say, is no hindrance
            self._cleared = len(self.slots)
            torch.cuda.empty_cache()
            return _another_fits()
        return False

    def close(self) -> None:
        """Let go of graphs and replicas, and give the default random stream back."""
        torch.cuda.synchronize()
        device = torch.cuda.current_device()
        torch.cuda.default_generators[device].graphsafe_set_state(torch.cuda.default_generators[device].clone_state())
        self.slots.clear()
        self.homes.clear()
        torch.cuda.empty_cache()


def _another_fits() -> bool:
    """Whether a slot of the usual size fits, by the memory that all slots of this process take."""
    free, total = torch.cuda.mem_get_info()
    slots = sum(len(place.slots) for place in GPU_PLACES)
    return (total - free) / slots < MEMORY_SHARE * free


def _stream(slot: Slot) -> torch.cuda.Stream:
    return slot.run_step.stream  # type: ignore[attr-defined]


def _set_precision(compute: Any) -> None:
    """tf32, and whether cuDNN keeps to kernels that repeat bit for bit, as the config says."""
    tf32 = compute.precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = compute.deterministic
    torch.backends.cudnn.benchmark = False  # its search takes half a minute for an EfficientNet, and gains nothing
