"""A whole consortium on one machine: certificates and files for everyone, a SuperLink, and sites as processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from equipoise.contract.config import Config
from equipoise.core.errors import UserError
from equipoise.core.storage import write_text
from equipoise.data import load_federation
from equipoise.engine.payload_files import safe_name
from equipoise.hospitals.allowed_plugins import run_at_sites
from equipoise.hospitals.authority import Authority, general_name
from equipoise.hospitals.deployment_files import LEAST, ServerFile
from equipoise.hospitals.policy import policy_for
from equipoise.hospitals.processes import Child, free_port
from equipoise.hospitals.security import keep_private, new_key_pair
from equipoise.methods import get_method

DAYS = 365
#: sites on this machine may look for messages often
POLL = 0.2


def make_certificates(
    folder: Path, address: str, hosts: Sequence[str], sites: Sequence[str], days: int = DAYS
) -> tuple[Path, dict[str, Path]]:
    """Keys, certificates and first TOML files of a consortium: one folder for the server, one for each site.

    Returns the server's file and {site: its file}. A site's file still needs its data and its policy.
    """
    _check_names(folder, hosts, sites)
    server = folder / "server"
    for private in (folder, server, *(folder / "sites" / safe_name(site) for site in sites)):
        keep_private(private)
    authority = Authority.new("Equipoise consortium", days)
    authority.write_certificate(server / "ca.crt")
    authority.write_key(folder / "ca.key")
    authority.issue([*hosts, "localhost", "127.0.0.1"], server / "server.crt", server / "server.key")
    new_key_pair(server / "coordinator.key", server / "coordinator.pub")
    files = {}
    for site in sites:
        new_key_pair(folder / "sites" / safe_name(site) / "node.key", folder / "sites" / safe_name(site) / "node.pub")
    for site in sites:
        own = folder / "sites" / safe_name(site)
        for name in ("ca.crt", "coordinator.pub"):
            (own / name).write_bytes((server / name).read_bytes())
        _copy(own / "node.pub", server / "nodes" / f"{safe_name(site)}.pub")
        for other in set(sites) - {site}:
            _copy(folder / "sites" / safe_name(other) / "node.pub", own / "peers" / f"{safe_name(other)}.pub")
        files[site] = own / "site.toml"
        _write_toml(
            files[site],
            {
                "name": site,
                "superlink": f"{f'[{hosts[0]}]' if ':' in hosts[0] else hosts[0]}:{address.rpartition(':')[2]}",
                "ca": "ca.crt",
                "key": "node.key",
                "coordinator": "coordinator.pub",
                "peers": "peers",
            },
        )
    _write_toml(
        server / "server.toml",
        {
            "address": address,
            "ca": "ca.crt",
            "certificate": "server.crt",
            "key": "server.key",
            "coordinator": "coordinator.key",
            "sites": {site: f"nodes/{safe_name(site)}.pub" for site in sites},
        },
    )
    return server / "server.toml", files


def _check_names(folder: Path, hosts: Sequence[str], sites: Sequence[str]) -> None:
    """Errors in the names show before a file is written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; choose a new folder for the keys of a consortium")
    if not all(site.strip() for site in sites):
        raise UserError("a site needs a name")
    twice = sorted({site for site in sites if list(sites).count(site) > 1})
    if twice:
        raise UserError(f"two sites are called '{twice[0]}'; every site needs a different name")
    for host in hosts:
        general_name(host)


def lay_out(folder: Path, config: Config, flower: Mapping[str, Any] | None = None) -> tuple[Path, dict[str, Path]]:
    """The files of a pilot: every site of the config's federation with its data and a policy for the method."""
    federation = load_federation(config.data, config.seed)
    sites = [site.name for site in federation.training_sites()]
    server, files = make_certificates(folder, f"127.0.0.1:{free_port()}", ["127.0.0.1"], sites, days=30)
    if flower:
        write_text(server, server.read_text() + "\n" + tomli_w.dumps({"flower": dict(flower)}))
    data = config.data.model_dump(mode="json", exclude_none=True)
    if "root" in data:
        data["root"] = str(Path(data["root"]).expanduser().resolve())
    data["store"] = str(config.data.store_root().resolve())
    for file in files.values():
        given = {
            "seed": config.seed,
            "device": config.compute.device,
            "poll": POLL,
            "least": min(config.privacy.least, LEAST) if "least" in config.privacy.model_fields_set else LEAST,
            "policy": policy_for(get_method(config.method).client_class(config)),
            "plugins": run_at_sites(config),
            "data": data,
        }
        write_text(file, file.read_text() + tomli_w.dumps(given))
    return server, files


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())


def _write_toml(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, tomli_w.dumps(content))


def start_site(file: Path, insecure: bool = False) -> Child:
    """`equipoise site FILE` as a process."""
    command = [sys.executable, "-m", "equipoise", "site", str(file), "--wait", "60"]
    log = file.with_name("site.log")
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMP_WAIT_POLICY": "PASSIVE"}
    return Child([*command, "--insecure"] if insecure else command, log, threads)


def files_of(folder: Path) -> tuple[Path, dict[str, Path]]:
    """The files that `lay_out` made: the server's, and each site's."""
    server = folder / "server" / "server.toml"
    known = ServerFile.read(server)
    return server, {site: folder / "sites" / safe_name(site) / "site.toml" for site in known.sites}


def check_running(children: Mapping[str, Child]) -> None:
    """Refuse to wait for sites that have ended."""
    for site, child in children.items():
        if not child.running:
            raise UserError(f"{site} ended with status {child.process.returncode}; its last words:\n{child.tail()}")


@contextmanager
def running_sites(files: Mapping[str, Path], insecure: bool = False) -> Iterator[dict[str, Child]]:
    """Every site as a process, ended with the block."""
    with ExitStack() as stack:
        yield {site: stack.enter_context(start_site(file, insecure)) for site, file in files.items()}
