"""A consortium of real processes on loopback for tests: a SuperLink and sites with TLS, all ended with the block."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flwr.proto.control_pb2 import ListNodesRequest

from equipoise.contract.config import Config
from equipoise.engine.loop import Observer
from equipoise.hospitals.coordinator import conduct, running_superlink
from equipoise.hospitals.deployment_files import ServerFile
from equipoise.hospitals.links import SuperLink
from equipoise.hospitals.pilot import lay_out, start_site
from equipoise.hospitals.policy import policy_for
from equipoise.hospitals.processes import Child
from equipoise.hospitals.security import node_keys
from equipoise.methods import get_method
from harness import TINY, tiny_config


@dataclass
class Consortium:
    """The files of a consortium, and its processes while they run."""

    server: Path
    files: dict[str, Path]
    sites: dict[str, Child] = field(default_factory=dict)
    superlink: SuperLink | None = None

    @property
    def settings(self) -> ServerFile:
        """What the server's file says."""
        return ServerFile.read(self.server)

    def start(self, site: str) -> None:
        """Start a site's process."""
        self.sites[site] = start_site(self.files[site])

    def stop(self) -> None:
        """End all sites' processes, which take some seconds, at the same time."""
        for child in self.sites.values():
            child.process.terminate()
        for child in self.sites.values():
            child.stop()

    def run(self, config: Config, folder: Path, observers: Sequence[Observer] = ()) -> Path:
        """Run a config with the sites; the server is this process."""
        assert self.superlink is not None
        return conduct(config, self.settings, folder, self.superlink, observers=observers)

    def online(self, site: str) -> bool:
        """Whether the SuperLink has the site's node among those that are connected."""
        assert self.superlink is not None
        (key,), client = node_keys(self.settings.sites[site]), self.superlink.private.control()
        try:
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
        finally:
            client.close()
        return any(node.public_key == key and node.status == "online" for node in nodes)


def lay_out_consortium(folder: Path, *methods: str, settings: Sequence[str] = (), **flower: float) -> Consortium:
    """Files for three sites of the tiny phantom, with policies that allow some methods."""
    config = tiny_config(methods[0], *settings)
    server, files = lay_out(folder, config, flower)
    allowed: dict[str, set[str]] = {}
    for config in map(tiny_config, methods):
        for action, entries in policy_for(get_method(config.method).client_class(config)).items():
            allowed.setdefault(action, set()).update(entries)
    policy = "[policy]\n" + "".join(f'"{action}" = {sorted(entries)}\n' for action, entries in allowed.items())
    for file in files.values():
        before, _, rest = file.read_text().partition("[policy]\n")
        file.write_text(before + policy + "\n[data]" + rest.partition("[data]")[2])
    return Consortium(server, files)


@contextmanager
def running_sites(consortium: Consortium) -> Iterator[None]:
    """The consortium's sites as processes."""
    try:
        for site in consortium.files:
            consortium.start(site)
        yield
    finally:
        consortium.stop()


@contextmanager
def running(consortium: Consortium) -> Iterator[Consortium]:
    """The consortium's SuperLink and sites as processes."""
    with running_superlink(consortium.settings, insecure=False) as superlink:
        consortium.superlink = superlink
        with running_sites(consortium):
            yield consortium


def start_server(
    consortium: Consortium,
    folder: Path,
    method: str,
    *settings: str,
    resume: bool = False,
    program: Sequence[str] = ("-m", "equipoise", "server"),
) -> Child:
    """`equipoise server`, or another program that takes its arguments, as a process of its own."""
    command = [sys.executable, *program, str(consortium.server), "--method", method]
    command += ["--out", str(folder)] + (["--resume"] if resume else [])
    for setting in (*TINY, *settings):
        command += ["--set", setting]
    return Child(command, folder.with_name(f"{folder.name}-server.log"))


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something holds; fail in words if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.05)


def finish(child: Child, seconds: float) -> int:
    """The exit status of a process that should end by itself."""
    try:
        return child.process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{child.log.name} still runs after {seconds:.0f} s:\n{child.tail(20)}") from None
