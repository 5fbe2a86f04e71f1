"""`equipoise server`: starts the SuperLink, waits for the named sites, and runs a config with them to the end.

The run folder is that of a local run; besides, `consortium.json` holds what the sites said of their data, so that a
run can be resumed while some of them are away.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from equipoise.config import Config
from equipoise.data.federation import Federation
from equipoise.deploy.descriptions import agreed_federation, hosts
from equipoise.deploy.flower_api import Link, public_key_bytes, register_nodes, server_grid
from equipoise.deploy.post import GridPost
from equipoise.deploy.processes import start_superlink, wait_until_healthy
from equipoise.deploy.security import signer, write_secret
from equipoise.deploy.settings import ServerFile, check_security, split_address
from equipoise.engine.contract import Method, Setting
from equipoise.engine.files import write_text
from equipoise.engine.flower import FlowerEngine, FlowerOptions, Post, Roster
from equipoise.engine.loop import Observer, Run
from equipoise.engine.parcels import Parcel
from equipoise.errors import UserError
from equipoise.methods import get_method
from equipoise.runs import with_net

CONSORTIUM = "consortium.json"
#: on resume, how long sites have to find the new SuperLink; Flower's nodes try ever more seldom, up to 20 s apart
RECONNECT_SECONDS = 120.0


@contextmanager
def running_superlink(settings: ServerFile, insecure: bool) -> Iterator[Link]:
    """A SuperLink that lets the sites of the file in, for as long as the block lasts."""
    check_security(settings, settings.address, insecure)
    for site, key in settings.sites.items():
        if not insecure and not key.is_file():
            raise UserError(f"sites: the public key of '{site}', {key}, is not there")
    secret = settings.state / "secret"
    if not secret.exists():
        write_secret(secret, secrets.token_bytes(32))
    host, port = split_address(settings.address)
    near = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    link = Link(f"{near}:{port}", None if insecure else settings.ca, secret.read_bytes())
    if link.healthy() is None:
        raise UserError(f"something answers at {settings.address} already; end it, or choose another address")
    with start_superlink(settings, insecure, secret) as child:
        wait_until_healthy(link, child, "the SuperLink")
        if not insecure:
            register_nodes(link, _keys(settings))
        yield link


def _keys(settings: ServerFile) -> dict[str, bytes]:
    return {site: public_key_bytes(path) for site, path in settings.sites.items()}


def conduct(
    config: Config,
    settings: ServerFile,
    folder: Path,
    link: Link,
    resume: bool = False,
    observers: Sequence[Observer] = (),
) -> Path:
    """Run a config with the sites of a running SuperLink; gives the run folder."""
    method = get_method(config.method)
    if method.pooled:
        raise UserError(f"'{config.method}' needs all images in one place; between hospitals there is none")
    sign = signer(settings.coordinator) if settings.coordinator and not link.insecure else lambda parcel: parcel
    with server_grid(link) as grid:
        post = GridPost(grid, {} if link.insecure else _keys(settings), sign)
        consortium = _consortium(config, settings, folder, post, resume)
        federation = agreed_federation(config.data.name, consortium["sites"])
        config = with_net(config, federation.image_size)
        roster = Roster(consortium["run"], tuple(settings.sites), hosts(consortium["sites"]))
        maker = _EngineMaker(post, roster, settings.flower)
        Run(config, method, federation, folder, observers, engine=maker).execute(resume)
    return folder


class _EngineMaker:
    """Makes the engine that a run asks for."""

    def __init__(self, post: Post, roster: Roster, options: FlowerOptions):
        self.post, self.roster, self.options = post, roster, options

    def __call__(self, method: Method, setting: Setting, federation: Federation, folder: Path) -> FlowerEngine:
        return FlowerEngine(method, setting, folder, self.post, self.roster, self.options)


def _consortium(config: Config, settings: ServerFile, folder: Path, post: GridPost, resume: bool) -> Mapping[str, Any]:
    """The run's identity and the sites' descriptions: asked for at the start, read back on resume."""
    path = folder / CONSORTIUM
    if resume and path.exists():
        known = json.loads(path.read_text())
        if [d["site"] for d in known["sites"]] != list(settings.sites):
            raise UserError(f"{folder} holds a run of other sites than the server's file names")
        _wait_for_sites(post, list(settings.sites), config.train.min_sites, min(settings.wait, RECONNECT_SECONDS))
        return known
    if (folder / "events.jsonl").exists():
        raise UserError(f"{folder} already holds a run; use --resume to go on, or another --out")
    _wait_for_sites(post, list(settings.sites), len(settings.sites), settings.wait)
    replies = post.describe(list(settings.sites), config=config.to_toml(), method=config.method)
    consortium = {
        "run": f"{config.run_name}-{secrets.token_hex(4)}",
        "sites": [_description(site, reply) for site, reply in zip(settings.sites, replies)],
    }
    write_text(path, json.dumps(consortium, indent=1))
    return consortium


def _wait_for_sites(post: Post, sites: Sequence[str], enough: int, patience: float) -> None:
    """Wait for all sites; go on without some where enough of them are there."""
    missing = post.gather(sites, len(sites), patience)
    if len(sites) - len(missing) < enough:
        raise UserError(f"after {patience:.0f} s these sites are not connected: {', '.join(missing)}")


def _description(site: str, reply: Any) -> dict[str, Any]:
    """What a site said of itself; a site that refuses, or is another than it should be, ends the start."""
    if not isinstance(reply, Parcel):
        raise UserError(f"{site} did not say what data it has: {reply}")
    header = reply.header
    if "error" in header:
        raise UserError(f"{site} does not take part: {header['error']}")
    description = header["description"]
    if description["site"] != site:
        raise UserError(f"the node with the key of '{site}' says that it is '{description['site']}'")
    return description
