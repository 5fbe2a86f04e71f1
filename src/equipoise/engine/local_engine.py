"""The engine on one machine: sites take turns in this process, in worker processes, or on one or several devices.

Results do not depend on the number of workers. Round and site name every random stream, replies are merged in site
order, and all processes use the same number of threads.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path

from equipoise.contract.method import Method, Setting
from equipoise.contract.protocol import Ask, PerSite, SiteFailure, Value, payload_bytes
from equipoise.core.device_names import places_of_run
from equipoise.data.federation import Federation, Site
from equipoise.engine.engine import Engine, Outcomes, Place, shared_part
from equipoise.engine.gpu_place import GpuPlace
from equipoise.engine.payload_files import SpilledPayload, safe_name, write_payload
from equipoise.engine.slot import EVALUATE, Outcome, Request, Slot
from equipoise.engine.states import KEPT, SiteStates
from equipoise.engine.together import groups, perform_together
from equipoise.engine.training import SiteData, Steps
from equipoise.engine.worker_pool import TRAINING_COST, Pool

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
        self.folder = folder
        self.exchange = folder / "exchange"
        self.place = self._choose_place()

    def _choose_place(self) -> Place:
        compute = self.setting.config.compute
        devices = places_of_run(compute.device)
        if len(devices) > 1:
            return Pool(self, devices)
        if self.setting.device.type == "cuda":
            self._data: dict[str, SiteData] = {}
            self.states.budget = DEVICE_STATES
            return GpuPlace(self, partial(new_slot, self.method, self.setting))
        return _InProcess(self) if compute.workers == 1 else Pool(self, ["cpu"])

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self.exchange, ignore_errors=True)

    @property
    def elsewhere(self) -> bool:
        """Whether sites work in other processes."""
        return isinstance(self.place, Pool)

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
        return groups(
            requests,
            lambda request: ask.same_for_all and self.states.current(request.site) is None,
            self._sites.__getitem__,
            self.setting.config.evaluation.batch_size,
        )

    def cost(self, request: Request) -> float:
        """What a request costs beside others, by the images that it trains on and measures."""
        config, splits = self.setting.config.train, self._sites[request.data or request.site].splits
        seen = float(sum(len(splits.get(part, ())) for part in request.measure) * max(len(request.views), 1))
        if request.action == EVALUATE:
            return seen
        images = len(self._sites[request.site].splits.get("train", ()))
        return seen + TRAINING_COST * (config.steps * config.batch_size if config.steps else config.epochs * images)

    def reply_path(self, request: Request) -> Path:
        """The file of a reply that does not stay in memory."""
        return self.exchange / f"reply-{request.index}-{safe_name(request.site)}.safetensors"

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
                path = self.engine.reply_path(request)
                write_payload(path, outcome.payload)
                outcome.payload = SpilledPayload(path)
            outcomes[places[0]] = outcome
        return [outcomes[place] for place in range(len(requests))]

    def close(self) -> None:
        """Nothing to end."""
