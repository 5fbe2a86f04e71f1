"""`equipoise site`: a hospital's node, from one TOML file. Checks data, keys and connection first, in words."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.data.federation import Federation, Site
from equipoise.engine.payload_files import safe_name
from equipoise.engine.runs import choose_device
from equipoise.hospitals.authority import check_authority
from equipoise.hospitals.deployment_files import SiteFile, check_security
from equipoise.hospitals.descriptions import describe
from equipoise.hospitals.flower_api import serve_tasks
from equipoise.hospitals.ledger import Ledger
from equipoise.hospitals.links import Link, known_name
from equipoise.hospitals.office import Office
from equipoise.hospitals.parcels import Parcel, UnreadableParcel, prepare, seal
from equipoise.hospitals.policy import check_words
from equipoise.hospitals.processes import free_port, start_supernode
from equipoise.hospitals.records import from_records, to_records
from equipoise.hospitals.security import (
    SIGNED_WITH,
    keep_private,
    private_key,
    public_keys,
    reply_signer,
    verifier,
    write_secret,
)
from equipoise.hospitals.sum_desk import Identity

log = logging.getLogger(__name__)

#: what Flower writes when the SuperLink does not let a node in
REFUSED = "[code: 2004]"
CONNECTED = "the SuperLink does not let this site in: another process of it is connected, or was a minute ago"
REFUSAL_SECONDS = 90.0
RESTART_SECONDS = 3.0


def check_site(settings: SiteFile, insecure: bool) -> Federation:
    """Look at everything that can be wrong before a run: security, data, policy. Gives the site's data."""
    check_security(settings, settings.superlink, insecure)
    if not insecure:
        assert settings.ca and settings.key and settings.coordinator
        check_authority(settings.ca)
        private_key(settings.key)
        public_keys(settings.coordinator)
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
    """The data that the site's file names; if it holds one site only, that is this one, under any name."""
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


def check_admission(settings: SiteFile) -> None:
    """Refuse to go on when the server does not know this site's key, or knows it by another name."""
    assert settings.key
    known = known_name(Link(settings.superlink, settings.ca), private_key(settings.key))
    if known != settings.name:
        raise UserError(
            f"name = '{settings.name}', but the server knows this site's key as '{known}'; "
            "write that name, or ask the coordinator whose key it is"
        )


def _new_secret(settings: SiteFile) -> Path:
    """A secret that the SuperNode shares with this process, in a private folder."""
    keep_private(settings.state)  # models made from patients' images
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
        settings.least,
        settings.plugins,
        identity_of(settings, insecure),
        settings.epsilon,
    )
    sign = reply_signer(settings.key) if settings.key and not insecure else lambda reply, question: reply
    ledger = Ledger(settings.state)
    refused_since: float | None = None
    while True:
        port = free_port()
        with start_supernode(settings, insecure, port, secret) as node:
            before = len(node.said())
            link = Link(f"127.0.0.1:{port}", None, secret.read_bytes())
            serve_tasks(link, _handler(office, sign, ledger), lambda node=node: node.running)  # type: ignore[misc]
        refusal = _refusal(settings, insecure, node.said()[before:])
        if refusal:
            refused_since = refused_since or time.monotonic()
            log.warning("%s; trying again", refusal)
            if time.monotonic() - refused_since > REFUSAL_SECONDS:
                raise UserError(refusal)
        else:
            refused_since = None
            log.warning("the SuperNode ended with status %s (%s); starting it again", node.process.returncode, node.log)
        time.sleep(RESTART_SECONDS)


def identity_of(settings: SiteFile, insecure: bool) -> Identity:
    """How this site signs its keys of secure sums, and knows the other sites'."""
    if insecure or not settings.key:
        return Identity(settings.secure_sums)
    key, folder = private_key(settings.key), settings.peers

    def peers(site: str) -> list[ec.EllipticCurvePublicKey]:
        path = folder / f"{safe_name(site)}.pub" if folder else None
        return public_keys(path) if path and path.is_file() else []

    return Identity(settings.secure_sums, lambda text: key.sign(text, SIGNED_WITH), peers)


def _refusal(settings: SiteFile, insecure: bool, said: str) -> str | None:
    """Why the server does not let this site in, if so; `said` is what the SuperNode wrote."""
    if not insecure:
        try:
            check_admission(settings)
        except UserError as problem:
            return str(problem)
        except (httpx.HTTPError, OSError):  # it cannot answer, for example during a restart
            return None
    return CONNECTED if REFUSED in said else None


def _handler(office: Office, sign: Callable[[Parcel, Parcel], Parcel], ledger: Ledger) -> Callable[[Message], Message]:
    def handle(message: Message) -> Message:
        question = Parcel("")
        try:
            question = from_records(message.content)
            reply = office.answer(question)
        except UnreadableParcel as problem:
            reply = seal(prepare({}), error=f"the message cannot be read: {problem}")
        ledger.note(question, reply)
        return Message(to_records(sign(reply, question)), reply_to=message)

    return handle
