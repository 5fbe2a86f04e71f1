"""The door of the hospitals' port: a known site's SuperNode gets through to Flower's app, and nothing else does.

Flower serves all its calls from one app, and checks a node's key after it has read the body. Here only the exact paths
that SuperNodes call are open, and the caller's signature is checked before a byte of the body is read. (A rule that
forbids paths would not hold: an encoded slash walks round it.)
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import time
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP

log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: what a SuperNode with a key calls; if another Flower calls more, sites are refused and the tests say so
FLEET = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
ACTIVATE = "/v1/fleet/activate-node"
#: what a SuperNode without a key calls besides
SELF_REGISTERED = frozenset({"/v1/fleet/register-node", "/v1/fleet/unregister-node"})
#: Equipoise's question: which name does the server have for the key that signs this?
NAME = "/equipoise/name"
#: where a connection is found in a request
CONNECTION = "equipoise.connection"
#: the clock of a known site is wrong
WRONG_CLOCK = b"clock"
#: Flower cuts tensors into pieces of 5 MB; all else is smaller
LARGEST_BODY = 32 << 20
#: requests of one site that are worked on at a time; more wait, unread
AT_A_TIME = 8
#: a signature counts for so long (as in Flower), and once
FRESH_SECONDS = 305.0
#: how far a site's clock may be ahead
AHEAD_SECONDS = 5.0
#: refusals that are logged in a minute; the rest are counted
LOGGED = 20


class Connection(Protocol):
    """What the door asks of the connection that a request came by."""

    def prove(self, site: str) -> None:
        """The caller has shown a known site's key."""

    def abort(self) -> None:
        """Cut the connection."""


class Refused(Exception):
    """A request that does not get through, with the status and body of the answer."""

    def __init__(self, status: int, body: bytes = b""):
        self.status, self.body = status, body


def _flowers_refusal() -> Refused:
    """What Flower answers to a node that it does not know; a site reads these words."""
    told = API_ERROR_MAP[ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED]
    text = FlowerError(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, "").to_json(told.public_message)
    return Refused(told.http_status_code, json.dumps(text).encode())


class Signatures:
    """Tells which site has signed a request; each signature counts once.

    Args:
        keys: {public key in PEM: site}; a site whose key is being renewed has two
    """

    def __init__(self, keys: Mapping[bytes, str]):
        self.keys = dict(keys)
        self._seen: OrderedDict[tuple[bytes, int], float] = OrderedDict()

    def site_of(self, headers: list[tuple[bytes, bytes]]) -> str:
        """The name of the site that signed; refuses all else."""
        try:
            key = b64decode(_only(headers, FLEET_HTTP_PUBLIC_KEY_HEADER), validate=True)
            signature = b64decode(_only(headers, FLEET_HTTP_SIGNATURE_HEADER), validate=True)
            stamp = _only(headers, TIMESTAMP_HEADER)
            site = self.keys[key]
            public = load_pem_public_key(key)
            assert isinstance(public, ec.EllipticCurvePublicKey)
            public.verify(signature, stamp, ec.ECDSA(hashes.SHA256()))
            age = time.time() - datetime.datetime.fromisoformat(stamp.decode("ascii")).timestamp()
            # The other half of a signature can be changed so that it is still valid.
            once = key, decode_dss_signature(signature)[0]
        except (KeyError, ValueError, OverflowError, InvalidSignature):
            raise Refused(401) from None
        if not -AHEAD_SECONDS < age < FRESH_SECONDS:
            raise Refused(401, WRONG_CLOCK)
        self._note(once)
        return site

    def _note(self, once: tuple[bytes, int]) -> None:
        now = time.monotonic()
        while self._seen and next(iter(self._seen.values())) < now - FRESH_SECONDS - 2 * AHEAD_SECONDS:
            self._seen.popitem(last=False)
        if once in self._seen:
            raise Refused(401)
        self._seen[once] = now


def _only(headers: list[tuple[bytes, bytes]], name: str) -> bytes:
    """The value of a header that must be there exactly once."""
    values = [value for given, value in headers if given == name.lower().encode()]
    if len(values) != 1:
        raise ValueError(f"{len(values)} headers {name}")
    return values[0]


class Door:
    """Passes on to Flower's app what known SuperNodes ask.

    Args:
        keys: {public key in PEM: site}; None where nodes have no keys (--insecure, on this machine only)
        seconds: for a known site's request, from the first byte of its body to the last of the answer
    """

    def __init__(self, app: App, keys: Mapping[bytes, str] | None, seconds: float):
        self.app = app
        self.signatures = Signatures(keys) if keys is not None else None
        self.open = FLEET if keys is not None else FLEET | SELF_REGISTERED
        self.seconds = seconds
        self._places: dict[str, asyncio.Semaphore] = {}
        self._refusals = _Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        try:
            await self._serve(scope, receive, send)
        except Refused as refusal:
            self._refusals.tell(scope, refusal.status)
            await _answer(send, refusal.status, refusal.body)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The path in the sender's spelling: another spelling is another path.
        path = scope["raw_path"].decode("ascii", "replace")
        if path == "/health" and scope["method"] == "GET":
            return await _answer(send, 200)
        if path == NAME and scope["method"] == "GET" and self.signatures:
            return await _answer(send, 200, self._site(scope, path).encode())
        if path not in self.open or scope["method"] != "POST":
            raise Refused(404)
        site = self._site(scope, path)
        length = _length(scope)
        connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
        if connection is not None:
            connection.prove(site)
        try:
            async with self._places.setdefault(site, asyncio.Semaphore(AT_A_TIME)), asyncio.timeout(self.seconds):
                await self.app(_plain(scope, path), await _whole(receive, length), send)
        except TimeoutError:
            if connection is not None:
                connection.abort()
        return None

    def _site(self, scope: Scope, path: str) -> str:
        if self.signatures is None:
            return ""
        try:
            return self.signatures.site_of(scope["headers"])
        except Refused as refusal:
            raise (_flowers_refusal() if path == ACTIVATE and not refusal.body else refusal) from None


def _length(scope: Scope) -> int:
    """The length of the body. The head must name it once, and it is limited."""
    told = [value for name, value in scope["headers"] if name == b"content-length"]
    if len(told) != 1 or not told[0].isdigit():
        raise Refused(411)
    if int(told[0]) > LARGEST_BODY:
        raise Refused(413)
    return int(told[0])


def _plain(scope: Scope, path: str) -> Scope:
    """The request as Flower's app should see it: its path is the checked one, and no Host can change that."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    own = {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    return {**scope, **own, "extensions": {}}


async def _whole(receive: Receive, length: int) -> Receive:
    """The body, read to its end, as something that can be received once."""
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise Refused(400)
        body += event.get("body", b"")
        if not event.get("more_body"):
            break
    if len(body) != length:
        raise Refused(400)
    events = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def replay() -> dict[str, Any]:
        return events.pop() if events else await receive()

    return replay


async def _answer(send: Send, status: int, body: bytes = b"") -> None:
    """Answer and close."""
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    if body.startswith(b"{"):
        headers.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Refusals:
    """Logs refusals, but only so many in a minute: strangers must not fill the disk."""

    def __init__(self) -> None:
        self._minute, self._count = 0, 0

    def tell(self, scope: Scope, status: int) -> None:
        """Log one refusal."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            if self._count > LOGGED:
                log.warning("%d more requests were refused", self._count - LOGGED)
            self._minute, self._count = minute, 0
        self._count += 1
        if self._count <= LOGGED:
            address = (scope.get("client") or ("?",))[0]
            log.warning("refused with %d: %s %r from %s", status, scope["method"], scope["raw_path"][:80], address)
