"""`equipoise site`: a hospital's node, from one TOML file. Checks data, keys and connection first, in words."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flwr.app import Message

from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.data.federation import Federation, Site
from equipoise.engine.runs import choose_device
from equipoise.hospitals.deployment_files import SiteFile, check_security
from equipoise.hospitals.descriptions import describe
from equipoise.hospitals.flower_api import Link, registered_name, serve_tasks
from equipoise.hospitals.office import Office
from equipoise.hospitals.parcels import UnreadableParcel, prepare, seal
from equipoise.hospitals.policy import check_words
from equipoise.hospitals.processes import free_port, start_supernode
from equipoise.hospitals.records import from_records, to_records
from equipoise.hospitals.security import check_authority, private_key, public_key, verifier, write_secret

log = logging.getLogger(__name__)

#: what Flower writes when the SuperLink does not let a node in
REFUSED = "[code: 2004]"
REFUSAL = (
    "the SuperLink does not let this site in: it does not know this site's key, "
    "or another process of this site is connected or was killed less than a minute ago"
)
ASK_COORDINATOR = "ask the coordinator to add this site's public key to the server's file"
#: what it writes when it has been let in
ADMITTED = "SuperNode ID:"
ADMISSION_SECONDS = 60.0
REFUSAL_SECONDS = 90.0
RESTART_SECONDS = 3.0


def check_site(settings: SiteFile, insecure: bool) -> Federation:
    """Look at everything that can be wrong before a run: security, data, policy. Gives the site's data."""
    check_security(settings, settings.superlink, insecure)
    if not insecure:
        assert settings.ca and settings.key and settings.coordinator
        check_authority(settings.ca)
        private_key(settings.key)
        public_key(settings.coordinator)
    federation = own_federation(settings)
    told = describe(settings.name, federation)
    if not any(told["counts"]["train"]):
        raise UserError(f"site '{settings.name}' has no training image in {settings.data.name}")
    if not settings.policy:
        raise UserError("the policy allows nothing to leave; `equipoise methods show NAME` lists what a method sends")
    check_words(settings.policy)
    choose_device(settings.device)
    return federation


def own_federation(settings: SiteFile) -> Federation:
    """The data that the site's file names; where it holds one site only, that is this one, whatever its name there."""
    federation = load_federation(settings.data, settings.seed, whole=False)
    if len(federation.sites) > 1:
        return federation
    return replace(federation, sites=(Site(settings.name, federation.sites[0].splits),))


def check_connection(settings: SiteFile, insecure: bool, patience: float = 0.0) -> None:
    """Refuse to go on when the SuperLink cannot be reached, or is not the one that the CA vouches for."""
    link = Link(settings.superlink, None if insecure else settings.ca)
    deadline = time.monotonic() + patience
    while (problem := link.healthy()) is not None and time.monotonic() < deadline:
        time.sleep(1.0)
    if problem is not None:
        raise UserError(
            f"cannot reach the SuperLink at {link.url}: {problem}; check that the server runs, that the firewall lets "
            f"this machine connect out to {settings.superlink}, and that ca is the consortium's"
        )


def check_admission(settings: SiteFile, insecure: bool) -> None:
    """Refuse to go on when the SuperLink does not let this site's node in, or knows it by another name."""
    secret = _new_secret(settings)
    with start_supernode(settings, insecure, free_port(), secret) as node:
        before = len(node.said())
        deadline = time.monotonic() + ADMISSION_SECONDS
        while node.running and ADMITTED not in node.said()[before:] and time.monotonic() < deadline:
            time.sleep(0.2)
        said = node.said()[before:]
    if REFUSED in said:
        raise UserError(f"{REFUSAL}; {ASK_COORDINATOR}")
    if ADMITTED not in said:
        raise UserError(f"the SuperNode was not let in within {ADMISSION_SECONDS:.0f} s; {node.log} says more")
    if not insecure:
        check_name(settings)


def check_name(settings: SiteFile) -> None:
    """Refuse a name other than the one that this site's key has at the server; a run would be refused for it."""
    assert settings.key
    known = registered_name(Link(settings.superlink, settings.ca), private_key(settings.key).public_key())
    if known and known != settings.name:
        raise UserError(
            f"name = '{settings.name}', but the server knows this site's key as '{known}'; "
            "write that name, or ask the coordinator whose key it is"
        )


def _new_secret(settings: SiteFile) -> Path:
    """A secret that the SuperNode shares with this process, in a folder of our own."""
    settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)  # models made from patients' images
    secret = settings.state / "flower" / "secret"
    write_secret(secret, secrets.token_bytes(32))
    return secret


def serve(settings: SiteFile, insecure: bool, federation: Federation) -> None:
    """Take part in runs until stopped; the SuperNode is started again when it ends."""
    secret = _new_secret(settings)
    office = Office(
        settings.name,
        federation,
        settings.state / "runs",
        settings.policy,
        choose_device(settings.device),
        verifier(settings.coordinator) if settings.coordinator and not insecure else lambda parcel: None,
        settings.data,
    )
    refused_since: float | None = None
    while True:
        port = free_port()
        with start_supernode(settings, insecure, port, secret) as node:
            before = len(node.said())
            link = Link(f"127.0.0.1:{port}", None, secret.read_bytes())
            serve_tasks(link, _handler(office), lambda node=node: node.running)  # type: ignore[misc]
        if REFUSED in node.said()[before:]:
            refused_since = refused_since or time.monotonic()
            log.warning("%s; trying again", REFUSAL)
            if time.monotonic() - refused_since > REFUSAL_SECONDS:
                raise UserError(f"{REFUSAL}; {ASK_COORDINATOR}")
        else:
            refused_since = None
            log.warning("the SuperNode ended with status %s (%s); starting it again", node.process.returncode, node.log)
        time.sleep(RESTART_SECONDS)


def _handler(office: Office) -> Callable[[Message], Message]:
    def handle(message: Message) -> Message:
        try:
            content = to_records(office.answer(from_records(message.content)))
        except UnreadableParcel as problem:
            content = to_records(seal(prepare({}), error=f"the message cannot be read: {problem}"))
        return Message(content, reply_to=message)

    return handle
