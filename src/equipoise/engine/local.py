"""The engine on one machine: sites take turns in this process, or in a pool of worker processes.

Results do not depend on the number of workers: every random stream is named by round and site, replies are
merged in site order, and each process computes with the same number of threads.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch

from equipoise.contract.config import Config
from equipoise.contract.method import Method, Setting
from equipoise.contract.protocol import Ask, PerSite, SiteFailure, Value, payload_bytes
from equipoise.core.errors import UserError
from equipoise.core.outside import is_outside
from equipoise.data.augment import build_augmentation
from equipoise.data.federation import Federation, Site
from equipoise.engine.allocator import keep_freed_memory
from equipoise.engine.base import Engine, Outcomes, Place, shared_part
from equipoise.engine.cohort import Cohort
from equipoise.engine.payload_files import SpilledPayload, read_payload, safe_name, write_payload
from equipoise.engine.slot import EVALUATE, Outcome, Request, Slot, exhaust
from equipoise.engine.states import KEPT, SiteStates, read_state, write_state
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
    config = setting.config
    augmentation = build_augmentation(config.augment, setting.image_size, setting.channels)
    return Slot(method.client_class(config)(setting), augmentation, run_step)


class LocalEngine(Engine):
    """Drives the sites of a federation on this machine."""

    states: SiteStates
    sees_images = True

    def __init__(self, method: Method, setting: Setting, federation: Federation, folder: Path):
        self._sites = all_sites(federation)
        super().__init__(method, setting, list(self._sites), SiteStates(folder / "sites"))
        self.federation = federation
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

    def begin(self, round_number: int, attempt: int) -> None:
        """Start a round anew: nothing is pending, nobody has failed, no reply lies about."""
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

    def data(self, name: str) -> SiteData:
        """The images of a site, a common set or a cohort: memory maps on a CPU, resident on a GPU."""
        if self.setting.device.type != "cuda":
            return SiteData(self._sites[name], self.setting.num_classes, self.setting.device)
        if name not in self._data:
            self._data[name] = SiteData(self._sites[name], self.setting.num_classes, self.setting.device)
        return self._data[name]


class _InProcess:
    """Sites take turns on one slot in this process."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine
        self.slot = new_slot(engine.method, engine.setting)

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Outcomes:
        states, in_memory = self.engine.states, 0
        outcomes: list[Outcome | SiteFailure] = []
        for request in requests:
            data = self.engine.data(request.site)
            elsewhere = self.engine.data(request.data) if request.data else None
            try:
                outcome = yield from self.slot.perform(
                    request, ask.message(request.site), states.load(request.site), data, elsewhere
                )
            except SiteFailure as failure:
                outcomes.append(failure)
                continue
            if outcome.kept is not None:
                states.put(request.site, version, outcome.kept)
                outcome.kept = None
            in_memory += payload_bytes(outcome.payload)
            if in_memory > REPLY_BUDGET and outcome.payload:
                path = self.engine.exchange / f"reply-{request.index}-{safe_name(request.site)}.safetensors"
                write_payload(path, outcome.payload)
                outcome.payload = SpilledPayload(path)
            outcomes.append(outcome)
        return outcomes

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
            initargs=(config, None if is_outside(config.method) else engine.method, engine.federation),
        )

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Outcomes:
        engine = self.engine
        per_site = any(isinstance(value, PerSite) for value in ask.payload.values())
        shared = engine.exchange / f"message-{engine._index}-{ask.action}.safetensors"
        if requests and not per_site:
            write_payload(shared, ask.message(requests[0].site))
        engine.states.flush()
        futures = []
        for request in requests:
            message = shared
            if per_site:
                message = shared.with_name(f"{shared.stem}-{safe_name(request.site)}.safetensors")
                write_payload(message, ask.message(request.site))
            current = engine.states.current(request.site)
            kept = engine.states.path(request.site, current) if current else None
            reply = engine.exchange / f"reply-{engine._index}-{safe_name(request.site)}.safetensors"
            after = engine.states.path(request.site, version) if version else None
            futures.append(self.pool.submit(_work, request, message, kept, reply, after))
        outcomes: list[Outcome | SiteFailure] = []
        for request, future in zip(requests, futures):
            yield
            try:
                outcome, measures, wrote_state = future.result()
            except SiteFailure as failure:
                outcomes.append(failure)
                continue
            except BrokenProcessPool:
                raise UserError(
                    "a worker process was ended from outside (out of memory?); "
                    "try fewer --workers, and --resume to go on after the last complete round"
                ) from None
            if wrote_state:
                engine.states.note(request.site, version)
            outcome.measures = {
                name: {key: torch.from_numpy(value) for key, value in counts.items()}
                for name, counts in measures.items()
            }
            if request.action != EVALUATE:
                path = engine.exchange / f"reply-{engine._index}-{safe_name(request.site)}.safetensors"
                outcome.payload = SpilledPayload(path)
            outcomes.append(outcome)
        return outcomes

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
        return SiteData(self.sites[name], self.setting.num_classes, self.setting.device)


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


def _work(request: Request, message: Path, kept: Path | None, reply: Path, after: Path | None) -> Any:
    assert _worker is not None
    worker = _worker
    elsewhere = worker.data(request.data) if request.data else None
    state = read_state(kept) if kept else None
    outcome = exhaust(worker.slot.perform(request, read_payload(message), state, worker.data(request.site), elsewhere))
    if request.action != EVALUATE:
        write_payload(reply, outcome.payload)
    if outcome.kept is not None and after is not None:
        write_state(after, outcome.kept)
    measures = {name: {k: v.numpy() for k, v in counts.items()} for name, counts in outcome.measures.items()}
    return Outcome(facts=outcome.facts), measures, outcome.kept is not None and after is not None
