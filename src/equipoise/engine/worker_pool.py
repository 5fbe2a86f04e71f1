"""Worker processes: sites take turns on them, or are dealt to one process for each of several devices.

Payloads and states travel as files. Each worker drives its requests with a local engine: on one slot on a CPU, on
several on a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from equipoise.contract.config import Config
from equipoise.contract.method import Method, Setting
from equipoise.contract.protocol import Ask, Payload, SiteFailure
from equipoise.core.errors import UserError
from equipoise.core.plugins import is_plugin
from equipoise.data.federation import Federation
from equipoise.engine.allocator import keep_freed_memory
from equipoise.engine.engine import Outcomes
from equipoise.engine.payload_files import SpilledPayload, read_payload, safe_name, write_payload
from equipoise.engine.slot import EVALUATE, Outcome, Request, exhaust
from equipoise.methods import get_method

#: what training on an image costs, beside predicting it
TRAINING_COST = 3.0

Answer = tuple[Outcome, dict[str, dict[str, Any]], bool] | SiteFailure
"""What a worker hands back: an outcome without tensors, what was measured as arrays, whether it wrote a state."""


class Pool:
    """Workers that take the next requests that wait; with several devices, each is dealt its share at once."""

    def __init__(self, engine: Any, devices: Sequence[str]):
        self.engine = engine
        self.devices = devices
        config: Config = engine.setting.config
        workers = config.compute.workers
        if len(devices) > 1 and workers > 1:
            raise UserError(
                f"compute.device = {config.compute.device!r} gives each device a process, and compute.workers asks for "
                "more: leave compute.workers out, and list more places, such as cpu:4"
            )
        engine.client(engine.setting)  # what is wrong with the settings shows here, not in a worker
        method = None if is_plugin("method", config.method) else engine.method
        self.pools = [
            ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(type(engine), config, method, engine.federation, engine.folder, device),
            )
            for device in devices
        ]

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Outcomes:
        """Perform all requests; outcomes in the order of the requests."""
        mail = self._write_mail(requests, ask)
        self.engine.states.flush()
        futures: list[tuple[list[int], Future[list[Answer]]]] = []
        for pool, places in self._dealt(requests, ask):
            own = [requests[place] for place in places]
            states = {r.site: now for r in own if (now := self.engine.states.current(r.site))}
            letters = mail if isinstance(mail, Path) else {r.site: mail[r.site] for r in own}
            with _told_in_words():
                futures.append((places, pool.submit(_work, own, letters, states, version)))
        outcomes: dict[int, Outcome | SiteFailure] = {}
        for places, future in futures:
            yield
            with _told_in_words():
                answers = future.result()
            for place, answer in zip(places, answers):
                outcomes[place] = self._received(requests[place], version, answer)
        return [outcomes[place] for place in range(len(requests))]

    def _write_mail(self, requests: Sequence[Request], ask: Ask) -> Path | dict[str, Path]:
        """The file of a message that is the same for all sites, or the file of each site's message."""
        shared: Path = self.engine.exchange / f"message-{self.engine.asked}-{ask.action}.safetensors"
        if ask.same_for_all:
            if requests:
                write_payload(shared, ask.message(requests[0].site))
            return shared
        paths = {r.site: shared.with_name(f"{shared.stem}-{safe_name(r.site)}.safetensors") for r in requests}
        for site, path in paths.items():
            write_payload(path, ask.message(site))
        return paths

    def _dealt(self, requests: Sequence[Request], ask: Ask) -> list[tuple[ProcessPoolExecutor, list[int]]]:
        """Which requests a worker performs one after the other, by their places, and the worker's pool."""
        groups: list[list[int]] = self.engine.groups(requests, ask)
        costs = [sum(self.engine.cost(requests[place]) for place in group) for group in groups]
        if len(self.pools) == 1:
            return [(self.pools[0], groups[number]) for number in dearest_first(costs)]
        shares = deal(costs, len(self.pools))
        dealt = [[place for number in share for place in groups[number]] for share in shares]
        return [(pool, places) for pool, places in zip(self.pools, dealt) if places]

    def _received(self, request: Request, version: str, answer: Answer) -> Outcome | SiteFailure:
        """An outcome as a worker gave it, with tensors for arrays and the reply that lies in a file."""
        if isinstance(answer, SiteFailure):
            return answer
        outcome, measures, wrote_state = answer
        if wrote_state:
            self.engine.states.note(request.site, version)
        outcome.measures = {
            name: {key: torch.from_numpy(value) for key, value in counts.items()} for name, counts in measures.items()
        }
        if request.action != EVALUATE:
            outcome.payload = SpilledPayload(self.engine.reply_path(request), self.engine.setting.device)
        return outcome

    def close(self) -> None:
        """End the workers; all that is wanted of them is here.

        They are not asked to: a worker that was killed while it waited for work holds the lock of their queue for ever.
        """
        for pool in self.pools:
            for process in [*(pool._processes or {}).values()]:
                process.kill()
            pool.shutdown(cancel_futures=True)


@contextmanager
def _told_in_words() -> Iterator[None]:
    """A killed worker is met when work is handed out, or when it is waited for."""
    try:
        yield
    except BrokenProcessPool:
        raise UserError(
            "a worker process was ended from outside (out of memory?); "
            "try fewer --workers, and --resume to go on after the last complete round"
        ) from None


def dearest_first(costs: Sequence[float]) -> list[int]:
    """Places by what they cost, the dearest first: a round ends with the last of them."""
    return sorted(range(len(costs)), key=lambda place: -costs[place])


def deal(costs: Sequence[float], hands: int) -> list[list[int]]:
    """Deal work out, the dearest first, each time to the hand with the least so far.

    The longest hand takes at most 4/3 of the best possible time (Graham, 1969).

    >>> deal([1, 5, 2, 3], 2)
    [[1], [3, 2, 0]]
    """
    shares: list[list[int]] = [[] for _ in range(hands)]
    totals = [0.0] * hands
    for place in dearest_first(costs):
        least = totals.index(min(totals))
        shares[least].append(place)
        totals[least] += costs[place]
    return shares


# ---- in a worker ----------------------------------------------------------------------------------------------------

_worker: Any = None


class _Mailed(Ask):
    """An ask whose messages lie in files."""

    def __init__(self, action: str, sites: Sequence[str], mail: Path | Mapping[str, Path], device: torch.device):
        super().__init__(action, sites)
        self.mail = mail
        self.device = device
        self.read: tuple[Path, Payload] | None = None

    @property
    def same_for_all(self) -> bool:
        return isinstance(self.mail, Path)

    def message(self, site: str) -> Payload:
        path = self.mail if isinstance(self.mail, Path) else self.mail[site]
        if self.read is None or self.read[0] != path:
            self.read = path, read_payload(path, self.device)
        return dict(self.read[1])


def _end_with_parent() -> None:
    """Do not outlive the main process, however it ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _start_worker(
    engine: Callable[..., Any],
    config: Config,
    method: Method | None,
    federation: Federation,
    folder: Path,
    device: str,
) -> None:
    """Make this process a worker; a method from a file cannot travel, and is looked up here."""
    global _worker  # noqa: PLW0603 - a process pool hands nothing else to its tasks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main one ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(config.compute.threads)
    keep_freed_memory()
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # streams, captures and kernels go to the current one
    alone = config.model_copy(update={"compute": config.compute.model_copy(update={"workers": 1, "device": device})})
    method = method or get_method(config.method)
    _worker = engine(method, Setting.of(alone, method, federation, device), federation, folder)
    _worker.states.budget = -1  # the main process reads each state from its file


def _work(
    requests: Sequence[Request], mail: Path | Mapping[str, Path], states: Mapping[str, str], version: str
) -> list[Answer]:
    """Perform requests in this worker's place; replies and next states go to their files."""
    assert _worker is not None
    engine = _worker
    engine.states.restore(states)
    ask = _Mailed(requests[0].action, [request.site for request in requests], mail, engine.setting.device)
    outcomes = exhaust(engine.place.run(requests, ask, version))
    return [_answer(engine, request, outcome) for request, outcome in zip(requests, outcomes)]


def _answer(engine: Any, request: Request, outcome: Outcome | SiteFailure) -> Answer:
    if isinstance(outcome, SiteFailure):
        return outcome
    if request.action != EVALUATE and not isinstance(outcome.payload, SpilledPayload):
        write_payload(engine.reply_path(request), outcome.payload)
    measures = {name: {k: v.cpu().numpy() for k, v in counts.items()} for name, counts in outcome.measures.items()}
    return Outcome(facts=outcome.facts, notes=outcome.notes), measures, request.site in engine.states.pending
