"""`equipoise server`: starts the SuperLink, waits for the named sites, and runs a config with them to the end.

The run folder is that of a local run. Besides, `consortium.json` holds the sites' descriptions of their data, so that a
run can resume while some sites are away.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.contract.config import Config
from equipoise.contract.method import Method, Setting
from equipoise.core.errors import UserError
from equipoise.core.storage import checked_text, read_checked, write_text
from equipoise.data.federation import Federation
from equipoise.engine.loop import Observer, Run
from equipoise.engine.payload_files import claimed_folder
from equipoise.engine.runs import config_of, decided_by_data, with_encoder
from equipoise.hospitals.authority import check_authority, check_server_certificate
from equipoise.hospitals.connections import Limits
from equipoise.hospitals.deployment_files import LEAST, ServerFile, check_security, split_address
from equipoise.hospitals.descriptions import (
    agreed_federation,
    described_counts,
    digests,
    hosts,
    read_description,
    training_images,
)
from equipoise.hospitals.exchange import FlowerOptions, Post, Roster
from equipoise.hospitals.flower_api import server_grid
from equipoise.hospitals.flower_engine import FlowerEngine
from equipoise.hospitals.links import Link, SuperLink, register_nodes
from equipoise.hospitals.parcels import Parcel, UnreadableParcel
from equipoise.hospitals.post import GridPost, Unreachable
from equipoise.hospitals.processes import (
    check_port,
    free_port,
    interrupted_by_end_of,
    started_superlink,
    wait_until_healthy,
)
from equipoise.hospitals.replies import words_of
from equipoise.hospitals.security import keep_private, node_keys, signer
from equipoise.hospitals.superlink import SuperLinkSettings
from equipoise.methods import get_method

CONSORTIUM = "consortium.json"
#: on resume, how long sites have to find the new SuperLink; Flower's nodes try ever more seldom, up to 20 s apart
RECONNECT_SECONDS = 120.0
#: between two looks for sites that are not there yet
LOOK_SECONDS = 1.0


def check_server(settings: ServerFile, insecure: bool) -> None:
    """Look at everything that can be wrong before anything starts: keys, certificates, the address."""
    check_security(settings, settings.address, insecure)
    if not insecure:
        assert settings.ca and settings.certificate and settings.key and settings.coordinator
        check_authority(settings.ca)
        check_server_certificate(settings.certificate, settings.key)
        signer(settings.coordinator)
        _keys(settings)
    check_port(settings.address)


def check_config(config: Config, settings: ServerFile) -> None:
    """Refuse what cannot be run with the sites of the server's file."""
    if get_method(config.method).pooled:
        raise UserError(f"'{config.method}' needs all images in one place; between hospitals there is none")
    least, sites = config.train.min_sites, len(settings.sites)
    if least > sites:
        raise UserError(f"train.min_sites = {least}, but the server's file names {sites} sites")


@contextmanager
def running_superlink(settings: ServerFile, insecure: bool, limits: Limits | None = None) -> Iterator[SuperLink]:
    """A SuperLink that lets the sites of the file in, for as long as the block lasts."""
    check_server(settings, insecure)
    keep_private(settings.state)
    told = _superlink_settings(settings, insecure, limits or Limits())
    host = "127.0.0.1" if told.host in ("0.0.0.0", "::") else told.host
    near = f"[{host}]:{told.port}" if ":" in host else f"{host}:{told.port}"
    private = Link(f"127.0.0.1:{told.private_port}", None, bytes.fromhex(told.secret), told.token)
    superlink = SuperLink(Link(near, None if insecure else settings.ca), private)
    with claimed_folder(settings.state), started_superlink(told) as child:
        wait_until_healthy(superlink.private, child, "the SuperLink")
        wait_until_healthy(superlink.public, child, "the SuperLink")
        with interrupted_by_end_of(child, "the SuperLink"):
            if not insecure:
                register_nodes(superlink.private, _keys(settings))
            yield superlink


def _superlink_settings(settings: ServerFile, insecure: bool, limits: Limits) -> SuperLinkSettings:
    """The settings of the SuperLink's process; its secrets are new at every start."""
    host, port = split_address(settings.address)
    keys = {key.decode(): site for site, own in _keys(settings).items() for key in own} if not insecure else None
    return SuperLinkSettings(
        host=host,
        port=port,
        private_port=free_port(),
        token=secrets.token_hex(32),
        secret=secrets.token_hex(32),
        folder=str(settings.state),
        keys=keys,
        certificate=None if insecure else str(settings.certificate),
        key=None if insecure else str(settings.key),
        limits=limits,
    )


def _keys(settings: ServerFile) -> dict[str, list[bytes]]:
    """The public keys of every site's node; each site must have its own."""
    owners: dict[bytes, str] = {}
    for site, path in settings.sites.items():
        if not path.is_file():
            raise UserError(f"sites: the public key of '{site}', {path}, is not there")
        for key in node_keys(path):
            if (owner := owners.setdefault(key, site)) != site:
                raise UserError(f"sites: '{owner}' and '{site}' have the same public key; every site needs its own")
    return {site: [key for key, owner in owners.items() if owner == site] for site in settings.sites}


def conduct(
    config: Config,
    settings: ServerFile,
    folder: Path,
    superlink: SuperLink,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    while_waiting: Callable[[], None] = lambda: None,
    keep_updates: bool = False,
) -> Path:
    """Run a config with the sites of a running SuperLink; gives the run folder.

    `while_waiting` is called now and then until the sites are connected; it may raise what makes waiting futile. With
    `keep_updates` sites' replies stay in the run's folder.
    """
    config = with_least(config, folder, resume)
    check_config(config, settings)
    method = get_method(config.method)
    sign = signer(settings.coordinator) if settings.coordinator and not superlink.insecure else lambda parcel: parcel
    keep_private(folder)
    with server_grid(superlink.private) as grid:
        post = GridPost(grid, {} if superlink.insecure else _keys(settings), sign)
        wait = _Wait(post, tuple(settings.sites), observers, while_waiting)
        consortium = _consortium(config, settings, folder, post, wait, resume)
        told = consortium["sites"]
        federation = agreed_federation(config.data.name, told)
        config, federation = with_encoder(decided_by_data(config, federation), federation)
        sites, counts = tuple(settings.sites), described_counts(told)
        roster = Roster(consortium["run"], sites, hosts(told), training_images(told), digests(told), counts)
        maker = _EngineMaker(post, roster, settings.flower, keep_updates)
        Run(config, method, federation, folder, observers, engine=maker).execute(resume)
    return folder


def with_least(config: Config, folder: Path, resume: bool) -> Config:
    """The config with the `privacy.least` of hospitals if the user set none; a continued run keeps its value."""
    if "least" in config.privacy.model_fields_set:
        return config
    least = config_of(folder).privacy.least if resume and (folder / "config.toml").is_file() else LEAST
    return config.model_copy(update={"privacy": config.privacy.model_copy(update={"least": least})})


class _EngineMaker:
    """Makes the engine that a run asks for."""

    def __init__(self, post: Post, roster: Roster, options: FlowerOptions, keep_updates: bool):
        self.post, self.roster, self.options, self.keep_updates = post, roster, options, keep_updates

    def __call__(self, method: Method, setting: Setting, federation: Federation, folder: Path) -> FlowerEngine:
        return FlowerEngine(method, setting, folder, self.post, self.roster, self.options, self.keep_updates)


@dataclass
class _Wait:
    """Waits until sites are connected, and tells observers which are."""

    post: Post
    sites: tuple[str, ...]
    observers: Sequence[Observer]
    check: Callable[[], None]
    began: float = field(default_factory=time.monotonic)

    def until_there(self, enough: int, patience: float) -> None:
        """Wait for all sites, from the beginning so many seconds; go on without some where enough are there."""
        deadline, known = self.began + patience, None
        while True:
            self.check()
            missing = self.post.gather(self.sites, len(self.sites), LOOK_SECONDS)
            if missing != known:
                self.tell("connected", sites=[s for s in self.sites if s not in missing], missing=missing)
                known = missing
            if not missing:
                return
            if time.monotonic() > deadline:
                break
        if len(self.sites) - len(missing) < enough:
            raise UserError(f"after {patience:.0f} s these sites are not connected: {', '.join(missing)}")

    def tell(self, event: str, **fields: Any) -> None:
        """Tell all observers."""
        for observer in self.observers:
            observer.event(event, **fields)


def _consortium(
    config: Config, settings: ServerFile, folder: Path, post: GridPost, wait: _Wait, resume: bool
) -> Mapping[str, Any]:
    """The run's identity and the sites' descriptions: asked for at the start, read back on resume."""
    path = folder / CONSORTIUM
    if resume and path.exists():
        known = _read_consortium(path)
        if [d["site"] for d in known["sites"]] != list(settings.sites):
            raise UserError(f"{folder} holds a run of other sites than the server's file names")
        wait.until_there(config.train.min_sites, min(settings.wait, RECONNECT_SECONDS))
        return known
    if (folder / "events.jsonl").exists():
        raise UserError(f"{folder} already holds a run; use --resume to go on, or another --out")
    consortium = {
        "run": f"{config.run_name}-{secrets.token_hex(4)}",
        "sites": _descriptions(config, settings, post, wait),
    }
    write_text(path, checked_text(consortium))
    return consortium


def _read_consortium(path: Path) -> dict[str, Any]:
    """What a run wrote of its sites."""
    try:
        known = read_checked(path.read_bytes())
        return {"run": str(known["run"]), "sites": [read_description(d["site"], d) for d in known["sites"]]}
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is damaged, so it cannot tell which sites the run has; put it back from a copy, or start a new run"
        ) from None


def _descriptions(config: Config, settings: ServerFile, post: GridPost, wait: _Wait) -> list[dict[str, Any]]:
    """What every site says of its data; the server asks a restarted site again until the wait is over."""
    told: dict[str, dict[str, Any]] = {}
    while True:
        wait.until_there(len(settings.sites), settings.wait)
        asked = [site for site in settings.sites if site not in told]
        replies = post.describe(asked, config=config.to_toml(), method=config.method)
        over = time.monotonic() - wait.began > settings.wait
        for site, reply in zip(asked, replies):
            if isinstance(reply, Unreachable) and not over:
                wait.tell("warning", text=f"{site} has to describe its data again: {reply}")
            else:
                told[site] = _description(site, reply)
        if len(told) == len(settings.sites):
            return [told[site] for site in settings.sites]
        time.sleep(LOOK_SECONDS)


def _description(site: str, reply: Any) -> dict[str, Any]:
    """What a site said of itself; a site that refuses, or is another than it should be, ends the start."""
    if not isinstance(reply, Parcel):
        raise UserError(f"{site} did not say what data it has: {reply}")
    try:
        header = reply.header
    except UnreadableParcel as problem:
        raise UserError(f"{site} did not say what data it has: {problem}") from None
    if "error" in header:
        raise UserError(f"{site} does not take part: {words_of(header['error'])}")
    description = read_description(site, header.get("description"))
    if description["site"] != site:
        raise UserError(f"the site with the key of '{site}' says that it is '{description['site']}'")
    return description
