"""The engine on one machine: sites take turns in this process, or in a pool of worker processes.

Results do not depend on the number of workers: every random stream is named by round and site, replies are
merged in site order, and each process computes with the same number of threads.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from equipoise.config import Config
from equipoise.data.augment import build_augmentation
from equipoise.data.federation import Federation, Site
from equipoise.engine.cohort import Cohort
from equipoise.engine.contract import Method, Setting
from equipoise.engine.files import SpilledPayload, read_payload, safe_name, write_payload
from equipoise.engine.protocol import (
    Ask,
    PerSite,
    Replies,
    Reply,
    SiteFailure,
    Tensors,
    Value,
    check_payload,
    first_unfinite,
    payload_bytes,
    signature,
)
from equipoise.engine.site import EVALUATE, Outcome, Request, Slot, exhaust
from equipoise.engine.states import SiteStates, read_state, write_state
from equipoise.engine.training import SiteData, Steps

Outcomes = Generator[None, None, list[Outcome | SiteFailure]]

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


class LocalEngine:
    """Drives the sites of a federation on this machine."""

    def __init__(self, method: Method, setting: Setting, federation: Federation, folder: Path):
        self.method = method
        self.client = method.client_class(setting.config)
        self.views = self.client.views_for(setting)
        self.setting = setting
        self.federation = federation
        self.folder = folder
        self.states = SiteStates(folder / "sites")
        self.exchange = folder / "exchange"
        self.failed: dict[str, str] = {}
        self.facts: dict[str, dict[str, float]] = {}
        self.measures: dict[str, dict[str, Tensors]] = {}
        self._round, self._attempt, self._index = 0, 0, 0
        self._sites = all_sites(federation)
        self._place = self._choose_place()

    def _choose_place(self) -> _InProcess | _Pool | Cohort:
        if self.setting.device.type == "cuda":
            self._data: dict[str, SiteData] = {}
            self.states.budget = DEVICE_STATES
            return Cohort(self, partial(new_slot, self.method, self.setting))
        return _InProcess(self) if self.setting.config.compute.workers == 1 else _Pool(self)

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._place.close()
        shutil.rmtree(self.exchange, ignore_errors=True)

    # ---- a round --------------------------------------------------------------------------------

    def begin(self, round_number: int, attempt: int) -> None:
        """Start a round anew: nothing is pending, nobody has failed."""
        self._round, self._attempt, self._index = round_number, attempt, 0
        self.states.rollback()
        self.failed, self.facts, self.measures = {}, {}, {}
        shutil.rmtree(self.exchange, ignore_errors=True)

    def commit(self) -> None:
        """The round is complete; what sites keep becomes their state."""
        self.states.commit()

    def ask(self, ask: Ask) -> Generator[None, None, Replies]:
        """Let the asked sites perform the action; returns the sound replies in site order, yields between steps."""
        self._check(ask)
        config = self.setting.config
        train = ask.action == "train" and config.evaluation.trained
        view = "personal" if "personal" in self.views else "global"
        requests = [
            Request(
                action=ask.action,
                site=site,
                round=self._round,
                attempt=self._attempt,
                index=self._index,
                measure=("valid",) if train else (),
                views=(view,),
            )
            for site in sorted(ask.sites, key=self._rank)
            if site not in self.failed
        ]
        version = f"{self._round:05d}-{self._attempt}-{self._index}"
        replies: list[Reply] = []
        outcomes = yield from self._place.run(requests, ask, version)
        for request, outcome in zip(requests, outcomes):
            if isinstance(outcome, SiteFailure):
                self._fail(request.site, str(outcome))
                continue
            replies.append(Reply(request.site, outcome.payload, outcome.measures, outcome.facts))
            self._note(request.site, outcome, ask)
        self._index += 1
        return Replies(self._sound(replies, ask), dict(self.failed))

    def evaluate(
        self, message: Mapping[str, Value | PerSite], requests: Sequence[Request]
    ) -> Generator[None, None, list[Outcome]]:
        """Measure models at sites; nothing that sites keep changes."""
        known = {name: value for name, value in message.items() if not isinstance(value, PerSite)}
        own = {name: value for name, value in message.items() if isinstance(value, PerSite)}
        sites = {request.site for request in requests}
        filled = {
            name: PerSite({site: value.values.get(site, next(iter(value.values.values()))) for site in sites})
            for name, value in own.items()
        }
        ask = Ask(EVALUATE, sorted(sites, key=self._rank), **known, **filled)
        asked = [replace(request, action=EVALUATE, round=max(self._round, 1)) for request in requests]
        outcomes = yield from self._place.run(asked, ask, version="")
        for outcome in outcomes:
            if isinstance(outcome, SiteFailure):
                raise RuntimeError(f"evaluation failed: {outcome}")
        return outcomes  # type: ignore[return-value]

    def data(self, request: Request) -> SiteData:
        """The images that a request uses: memory maps on a CPU, resident on a GPU."""
        name = request.data or request.site
        if self.setting.device.type != "cuda":
            return SiteData(self._sites[name], self.setting.num_classes, self.setting.device)
        if name not in self._data:
            self._data[name] = SiteData(self._sites[name], self.setting.num_classes, self.setting.device)
        return self._data[name]

    # ---- what comes back --------------------------------------------------------------------------

    def _rank(self, site: str) -> int:
        return list(self._sites).index(site)

    def _check(self, ask: Ask) -> None:
        unknown = set(ask.sites) - self._sites.keys()
        if unknown:
            raise ValueError(f"the server asks unknown sites: {', '.join(sorted(unknown))}")
        if not callable(getattr(self.client, ask.action, None)):
            raise ValueError(f"{self.client.__name__} has no action '{ask.action}'")
        for site in ask.sites:
            check_payload(ask.message(site), f"Ask('{ask.action}')")

    def _note(self, site: str, outcome: Outcome, ask: Ask) -> None:
        facts = self.facts.setdefault(site, {"sent": 0, "received": 0, "seconds": 0})
        facts["sent"] += payload_bytes(outcome.payload)
        facts["received"] += payload_bytes(ask.message(site))
        facts["seconds"] += outcome.facts.pop("seconds", 0.0)
        facts.update(outcome.facts)
        self.measures.setdefault(site, {}).update(outcome.measures)

    def _fail(self, site: str, why: str) -> None:
        self.failed[site] = why
        self.facts.pop(site, None)
        self.measures.pop(site, None)
        self.states.rollback([site])

    def _sound(self, replies: list[Reply], ask: Ask) -> list[Reply]:
        """Leave out replies that are not finite or not shaped as asked; their sites are out of the round."""
        signatures = {reply.site: signature(reply.payload) for reply in replies}
        expected = _expected(signatures, ask)
        sound = []
        for reply in replies:
            problem = _difference(signatures[reply.site], expected)
            if problem is None and (entry := first_unfinite(reply.payload)):
                problem = f"'{entry}' holds NaN or infinity"
            if problem is None:
                sound.append(reply)
            else:
                self._fail(reply.site, f"{ask.action}: {problem}")
        return sound


def _expected(signatures: Mapping[str, dict[str, Any]], ask: Ask) -> dict[str, Any]:
    """What a reply should look like: entries that were sent come back in the same shape, others as most have them."""
    if not signatures:
        return {}
    common = Counter(tuple(sorted(s.items(), key=lambda item: item[0])) for s in signatures.values())
    expected = dict(common.most_common(1)[0][0])
    sent = signature(ask.message(next(iter(signatures))))
    return {name: sent.get(name, shape) for name, shape in expected.items()}


def _difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    for name in expected.keys() | found.keys():
        if name not in found:
            return f"'{name}' is missing"
        if name not in expected:
            return f"'{name}' was not expected"
        if found[name] != expected[name]:
            return f"'{name}' is {found[name]}, expected {expected[name]}"
    return None


class _InProcess:
    """Sites take turns on one slot in this process."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine
        self.slot = new_slot(engine.method, engine.setting)

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Outcomes:
        states, in_memory = self.engine.states, 0
        outcomes: list[Outcome | SiteFailure] = []
        for request in requests:
            data = self.engine.data(request)
            try:
                outcome = yield from self.slot.perform(
                    request, ask.message(request.site), states.load(request.site), data
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
        self.pool = ProcessPoolExecutor(
            config.compute.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(config, engine.method, engine.federation),
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


_worker: _Worker | None = None


def _start_worker(config: Config, method: Method, federation: Federation) -> None:
    global _worker  # noqa: PLW0603 - a process pool hands nothing else to its tasks
    torch.set_num_threads(config.compute.threads)
    _worker = _Worker(config, method, federation)


def _work(request: Request, message: Path, kept: Path | None, reply: Path, after: Path | None) -> Any:
    assert _worker is not None
    worker = _worker
    data = SiteData(worker.sites[request.data or request.site], worker.setting.num_classes, worker.setting.device)
    state = read_state(kept) if kept else None
    outcome = exhaust(worker.slot.perform(request, read_payload(message), state, data))
    if request.action != EVALUATE:
        write_payload(reply, outcome.payload)
    if outcome.kept is not None and after is not None:
        write_state(after, outcome.kept)
    measures = {name: {k: v.numpy() for k, v in counts.items()} for name, counts in outcome.measures.items()}
    return Outcome(facts=outcome.facts), measures, outcome.kept is not None and after is not None
