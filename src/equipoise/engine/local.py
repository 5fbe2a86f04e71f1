"""The engine on one machine: sites take turns in this process, or in a pool of worker processes.

Results do not depend on the number of workers. Round and site name every random stream, replies are merged in site
order, and all processes use the same number of threads.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch

from equipoise.contract.config import Config
from equipoise.contract.method import Method, Setting
from equipoise.contract.protocol import Ask, PerSite, SiteFailure, Value, payload_bytes
from equipoise.core.errors import UserError
from equipoise.core.plugins import is_plugin
from equipoise.data.federation import Federation, Site
from equipoise.engine.allocator import keep_freed_memory
from equipoise.engine.base import Engine, Outcomes, Place, shared_part
from equipoise.engine.cohort import Cohort
from equipoise.engine.payload_files import SpilledPayload, read_payload, safe_name, write_payload
from equipoise.engine.slot import EVALUATE, Outcome, Request, Slot, exhaust
from equipoise.engine.states import KEPT, SiteStates, read_state, write_state
from equipoise.engine.together import groups, perform_together
from equipoise.engine.training import SiteData, Steps
from equipoise.methods import get_method

#: replies of one ask held in memory; the rest lies in files
REPLY_BUDGET = 1 << 28
#: what sites keep between asks, held on a GPU
DEVICE_STATES = 16 << 30


def all_sites(federation: Federation) -> dict[str, Site]:
    """Every site by name: those of the federation, the common evaluation set, unseen cohorts."""
    common = (federation.common,) if federation.common else ()
    return {site.name: site for site in (*federation.sites, *common, *federation.cohorts)}


def new_slot(method: Method, setting: Setting, run_step: Steps | None = None) -> Slot:
    """A workplace for the sites of a federation."""
    return Slot(method.client_class(setting.config)(setting), setting.augmentation(), run_step)


class LocalEngine(Engine):
    """Drives the sites of a federation on this machine."""

    states: SiteStates
    sees_images = True

    def __init__(self, method: Method, setting: Setting, federation: Federation, folder: Path):
        self._sites = all_sites(federation)
        super().__init__(method, setting, list(self._sites), SiteStates(folder / "sites"))
        self.federation = federation
        self._names = frozenset(site.name for site in federation.sites)
        self.exchange = folder / "exchange"
        self.place = self._choose_place()

    def _choose_place(self) -> Place:
        if self.setting.device.type == "cuda":
            self._data: dict[str, SiteData] = {}
            self.states.budget = DEVICE_STATES
            return Cohort(self, partial(new_slot, self.method, self.setting))
        return _InProcess(self) if self.setting.config.compute.workers == 1 else _Pool(self)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self.exchange, ignore_errors=True)

    def is_site(self, name: str) -> bool:
        """Whether a name is a site's, and not that of a common set or a cohort."""
        return name in self._names

    def begin(self, round_number: int, attempt: int) -> None:
        """Start a round anew: nothing is pending, no site has failed, no reply is left."""
        super().begin(round_number, attempt)
        shutil.rmtree(self.exchange, ignore_errors=True)

    def publish(
        self, folder: Path, message: Mapping[str, Value | PerSite], sites: Sequence[str], whole: bool = False
    ) -> Generator[None, None, None]:
        """Write out the global model, and beside it what each site keeps and is sent (for itself alone, or `whole`)."""
        yield from super().publish(folder, message, sites)
        shared = shared_part(message) if whole and "personal" in self.views else {}
        for site in sites:
            own = {name: value.values[site] for name, value in message.items() if isinstance(value, PerSite)} | shared
            kept = self.states.load(site)
            if kept is not None or own:
                path = folder / "personal" / f"{safe_name(site)}.safetensors"
                write_payload(path, own if kept is None else {**own, KEPT: kept})

    def groups(self, requests: Sequence[Request], ask: Ask) -> list[list[int]]:
        """The places of requests that are performed together: small sites that measure one model."""
        shared = not any(isinstance(value, PerSite) for value in ask.payload.values())
        return groups(
            requests,
            lambda request: shared and self.states.current(request.site) is None,
            self._sites.__getitem__,
            self.setting.config.evaluation.batch_size,
        )

    def data(self, name: str) -> SiteData:
        """The images of a site, a common set or a cohort: memory maps on a CPU, resident on a GPU."""
        if self.setting.device.type != "cuda":
            return SiteData(self._sites[name], self.setting.task, self.setting.device)
        if name not in self._data:
            self._data[name] = SiteData(self._sites[name], self.setting.task, self.setting.device)
        return self._data[name]


class _InProcess:
    """Sites take turns on one slot in this process."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine
        self.slot = new_slot(engine.method, engine.setting)

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Outcomes:
        states, in_memory = self.engine.states, 0
        outcomes: dict[int, Outcome | SiteFailure] = {}
        for places in self.engine.groups(requests, ask):
            if len(places) > 1:
                together = [requests[place] for place in places]
                message, sites = ask.message(together[0].site), [self.engine.data(r.site) for r in together]
                outcomes |= zip(places, (yield from perform_together(self.slot, together, message, sites)))
                continue
            request = requests[places[0]]
            data = self.engine.data(request.site)
            elsewhere = self.engine.data(request.data) if request.data else None
            try:
                outcome = yield from self.slot.perform(
                    request, ask.message(request.site), states.load(request.site), data, elsewhere
                )
            except SiteFailure as failure:
                outcomes[places[0]] = failure
                continue
            if outcome.kept is not None:
                states.put(request.site, version, outcome.kept)
                outcome.kept = None
            in_memory += payload_bytes(outcome.payload)
            if in_memory > REPLY_BUDGET and outcome.payload:
                path = self.engine.exchange / f"reply-{request.index}-{safe_name(request.site)}.safetensors"
                write_payload(path, outcome.payload)
                outcome.payload = SpilledPayload(path)
            outcomes[places[0]] = outcome
        return [outcomes[place] for place in range(len(requests))]

    def close(self) -> None:
        """Nothing to end."""


class _Pool:
    """Sites take turns on one slot in each of several worker processes; payloads travel as files."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine
        config = engine.setting.config
        engine.client(engine.setting)  # what is wrong with the settings shows here, not in a worker
        self.pool = ProcessPoolExecutor(
            config.compute.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(config, None if is_plugin("method", config.method) else engine.method, engine.federation),
        )

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Outcomes:
        engine = self.engine
        per_site = any(isinstance(value, PerSite) for value in ask.payload.values())
        shared = engine.exchange / f"message-{engine._index}-{ask.action}.safetensors"
        if requests and not per_site:
            write_payload(shared, ask.message(requests[0].site))
        engine.states.flush()
        futures: dict[tuple[int, ...], Future[list[Answer]]] = {}
        for places in engine.groups(requests, ask):
            if len(places) > 1:
                futures[tuple(places)] = self.pool.submit(_measure, [requests[place] for place in places], shared)
                continue
            request = requests[places[0]]
            message = shared
            if per_site:
                message = shared.with_name(f"{shared.stem}-{safe_name(request.site)}.safetensors")
                write_payload(message, ask.message(request.site))
            current = engine.states.current(request.site)
            kept = engine.states.path(request.site, current) if current else None
            after = engine.states.path(request.site, version) if version else None
            futures[tuple(places)] = self.pool.submit(_work, request, message, kept, self._reply(request), after)
        outcomes: dict[int, Outcome | SiteFailure] = {}
        for group, future in futures.items():
            yield
            try:
                found = future.result()
            except SiteFailure as failure:
                outcomes[group[0]] = failure
                continue
            except BrokenProcessPool:
                raise UserError(
                    "a worker process was ended from outside (out of memory?); "
                    "try fewer --workers, and --resume to go on after the last complete round"
                ) from None
            for place, answer in zip(group, found):
                outcomes[place] = self._received(requests[place], version, *answer)
        return [outcomes[place] for place in range(len(requests))]

    def _reply(self, request: Request) -> Path:
        """Where a worker writes what a site replies."""
        return self.engine.exchange / f"reply-{self.engine._index}-{safe_name(request.site)}.safetensors"

    def _received(self, request: Request, version: str, outcome: Outcome, measures: Any, wrote_state: bool) -> Outcome:
        """An outcome as a worker gave it, with tensors for arrays and the reply that lies in a file."""
        if wrote_state:
            self.engine.states.note(request.site, version)
        outcome.measures = {
            name: {key: torch.from_numpy(value) for key, value in counts.items()} for name, counts in measures.items()
        }
        if request.action != EVALUATE:
            outcome.payload = SpilledPayload(self._reply(request))
        return outcome

    def close(self) -> None:
        """End the workers."""
        self.pool.shutdown(cancel_futures=True)


class _Worker:
    """What a worker process holds between requests."""

    def __init__(self, config: Config, method: Method, federation: Federation):
        self.setting = Setting.of(config, method, federation)
        self.slot = new_slot(method, self.setting)
        self.sites = all_sites(federation)

    def data(self, name: str) -> SiteData:
        """The images of a site, a common set or a cohort."""
        return SiteData(self.sites[name], self.setting.task, self.setting.device)


_worker: _Worker | None = None


def _end_with_parent() -> None:
    """Do not outlive the main process, however it ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _start_worker(config: Config, method: Method | None, federation: Federation) -> None:
    """Make this process a worker; a method from a file cannot travel, and is looked up here."""
    global _worker  # noqa: PLW0603 - a process pool hands nothing else to its tasks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main one ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(config.compute.threads)
    keep_freed_memory()
    _worker = _Worker(config, method or get_method(config.method), federation)


Answer = tuple[Outcome, dict[str, dict[str, Any]], bool]
"""What a worker hands back: an outcome without tensors, what was measured as arrays, whether it wrote a state."""


def _work(request: Request, message: Path, kept: Path | None, reply: Path, after: Path | None) -> list[Answer]:
    assert _worker is not None
    worker = _worker
    elsewhere = worker.data(request.data) if request.data else None
    state = read_state(kept) if kept else None
    outcome = exhaust(worker.slot.perform(request, read_payload(message), state, worker.data(request.site), elsewhere))
    if request.action != EVALUATE:
        write_payload(reply, outcome.payload)
    if outcome.kept is not None and after is not None:
        write_state(after, outcome.kept)
    return [_answer(outcome, outcome.kept is not None and after is not None)]


def _measure(requests: Sequence[Request], message: Path) -> list[Answer]:
    """The answers to a group of requests."""
    assert _worker is not None
    sites = [_worker.data(request.site) for request in requests]
    outcomes = exhaust(perform_together(_worker.slot, requests, read_payload(message), sites))
    return [_answer(outcome, False) for outcome in outcomes]


def _answer(outcome: Outcome, wrote_state: bool) -> Answer:
    measures = {name: {k: v.numpy() for k, v in counts.items()} for name, counts in outcome.measures.items()}
    return Outcome(facts=outcome.facts, notes=outcome.notes), measures, wrote_state
