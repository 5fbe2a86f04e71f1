"""Sites without a network, for tests: a post that hands parcels to offices in this process, through Flower's records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import tiny_config, tiny_federation

from equipoise.config import Config
from equipoise.data import Federation
from equipoise.deploy.descriptions import agreed_federation, describe, hosts
from equipoise.deploy.office import Office
from equipoise.deploy.policy import policy_for
from equipoise.engine.flower import FlowerEngine, FlowerOptions, Roster
from equipoise.engine.loop import Run
from equipoise.engine.parcels import Parcel
from equipoise.engine.protocol import SiteFailure
from equipoise.methods import get_method


class Postbox:
    """Delivers parcels to offices at once; tests change what a site sends by overriding `carry`."""

    def __init__(self, offices: dict[str, Office]):
        self.offices = offices
        self.bytes = 0

    def exchange(self, parcels: Sequence[tuple[str, Parcel]], timeout: float) -> list[Parcel | SiteFailure]:
        return [self.carry(site, parcel) for site, parcel in parcels]

    def carry(self, site: str, parcel: Parcel) -> Parcel | SiteFailure:
        reply = self.offices[site].answer(parcel)
        self.bytes += parcel.size + reply.size
        return reply


def make_offices(folder: Path, config: Config, federation: Federation) -> dict[str, Office]:
    """An office for every site, each with its own folder and a policy that allows the config's method."""
    policy = policy_for(get_method(config.method).client_class(config))
    return {
        site.name: Office(site.name, federation, folder / "hospitals" / site.name, policy)
        for site in federation.training_sites()
    }


def flower_run(
    folder: Path, post: Postbox, config: Config, federation: Federation, options: FlowerOptions | None = None, observers=()
) -> Run:
    """A run whose sites are reached through a post."""
    told = [describe(site, federation) for site in post.offices]
    roster = Roster("test", tuple(post.offices), hosts(told))

    def engine(method, setting, _, run_folder):
        return FlowerEngine(method, setting, run_folder, post, roster, options or FlowerOptions())

    method = get_method(config.method)
    return Run(config, method, agreed_federation(config.data.name, told), folder, observers, engine=engine)


def run_by_post(folder: Path, method: str = "fedavg", *settings: str, options: FlowerOptions | None = None) -> Postbox:
    """Run a method on the tiny phantom with every site behind a post; gives the post."""
    config = tiny_config(method, *settings)
    federation = tiny_federation(config)
    post = Postbox(make_offices(folder, config, federation))
    flower_run(folder, post, config, federation, options).execute()
    return post
