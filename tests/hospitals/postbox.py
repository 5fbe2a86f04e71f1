"""Sites without a network, for tests: a post that hands parcels, as Flower's records, to offices in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from equipoise.contract.config import Config
from equipoise.contract.protocol import SiteFailure
from equipoise.data import Federation
from equipoise.engine.loop import Run
from equipoise.hospitals.descriptions import (
    agreed_federation,
    described_counts,
    digests,
    hosts,
    training_images,
)
from equipoise.hospitals.exchange import FlowerOptions, Roster
from equipoise.hospitals.flower_engine import FlowerEngine
from equipoise.hospitals.office import Office
from equipoise.hospitals.parcels import Parcel
from equipoise.hospitals.policy import policy_for
from equipoise.hospitals.records import from_records, to_records
from equipoise.methods import get_method
from harness import tiny_config, tiny_federation


class Postbox:
    """Delivers parcels to offices at once; tests change what a site does by overriding `carry`."""

    def __init__(self, offices: dict[str, Office]):
        self.offices = offices
        self.carried: list[tuple[str, dict]] = []

    def exchange(self, parcels: Sequence[tuple[str, Parcel]], timeout: float) -> list[Parcel | SiteFailure]:
        return [self.carry(site, from_records(to_records(parcel))) for site, parcel in parcels]

    def gather(self, sites: Sequence[str], enough: int, patience: float) -> list[str]:
        return []

    def carry(self, site: str, parcel: Parcel) -> Parcel | SiteFailure:
        self.carried.append((site, parcel.header))
        return from_records(to_records(self.offices[site].answer(parcel)))


class Hospitals:
    """A tiny federation whose sites have offices and folders of their own, and the runs they take part in."""

    def __init__(self, folder: Path, method: str = "fedavg", *settings: str, post: type[Postbox] = Postbox):
        self.folder = folder
        self.config: Config = tiny_config(method, *settings)
        self.federation: Federation = tiny_federation(self.config)
        self.post = post({site.name: self.office(site.name) for site in self.federation.training_sites()})

    def office(self, site: str) -> Office:
        """A site's office; a second one finds what the first left on disk, as after a restart."""
        policy = policy_for(get_method(self.config.method).client_class(self.config))
        return Office(site, self.federation, self.records(site), policy)

    def records(self, site: str) -> Path:
        """Where a site keeps its state."""
        return self.folder / "hospitals" / site

    def run(self, options: FlowerOptions | None = None, resume: bool = False, keep_updates: bool = False) -> Path:
        """Run the config to the end; gives the run folder."""
        told = [office.described(self.config) for office in self.post.offices.values()]
        sites, counts = tuple(self.post.offices), described_counts(told)
        roster = Roster("test", sites, hosts(told), training_images(told), digests(told), counts)

        def engine(method, setting, _, folder):
            return FlowerEngine(method, setting, folder, self.post, roster, options or FlowerOptions(), keep_updates)

        method, federation = get_method(self.config.method), agreed_federation("tiny", told)
        Run(self.config, method, federation, self.folder / "run", engine=engine).execute(resume)
        return self.folder / "run"
