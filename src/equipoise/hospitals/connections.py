"""Connections to the hospitals' port: few places and little time for callers who have not shown a known key.

uvicorn would wait a minute for a TLS handshake and for ever for the head of a request, and take any number of both.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

from equipoise.hospitals.door import CONNECTION


@dataclass(frozen=True)
class Limits:
    """What the hospitals' port allows.

    Attributes:
        strangers: connections that have not shown a known key
        site: connections of one site
        head_bytes: the size of a request's head
        head_seconds: for the TLS handshake and the head of the first request, and for the head of each later one
        request_seconds: for a known site's request, once its key is known
    """

    strangers: int = 200
    site: int = 64
    head_bytes: int = 64 << 10
    head_seconds: float = 15.0
    request_seconds: float = 300.0


class Places:
    """So many connections and no more: for a further one, the oldest of the address that has most of them is cut."""

    def __init__(self, number: int):
        self.number = number
        self._taken: dict[GuardedConnection, str] = {}

    def take(self, connection: GuardedConnection, address: str) -> None:
        """Give a connection a place."""
        self._taken[connection] = address
        if len(self._taken) > self.number:
            crowd, _ = Counter(self._taken.values()).most_common(1)[0]
            oldest = next(taken for taken, whence in self._taken.items() if whence == crowd)
            self.leave(oldest)
            oldest.abort()

    def leave(self, connection: GuardedConnection) -> None:
        """Let go of a connection's place, if it has one."""
        self._taken.pop(connection, None)


@dataclass
class Guard:
    """What all connections of the hospitals' port share."""

    limits: Limits = field(default_factory=Limits)
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self.strangers = Places(self.limits.strangers)
        self._sites: dict[str, Places] = {}

    def of_site(self, site: str) -> Places:
        """The places of one site."""
        return self._sites.setdefault(site, Places(self.limits.site))

    def connection(self, **given: Any) -> GuardedConnection:
        """A new connection, as uvicorn asks for it."""
        return GuardedConnection(self, **given)


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits, from the moment when a connection is accepted, before TLS."""

    def __init__(self, guard: Guard, **given: Any):
        super().__init__(**given)
        self.guard = guard
        self._early = b""
        self._head = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a stranger's place, and begin TLS."""
        self._socket = transport
        self._address = (get_remote_addr(transport) or ("?", 0))[0]
        self._places = self.guard.strangers
        self._places.take(self, self._address)
        self._wait_for_head()
        if self.guard.tls is None:
            super().connection_made(transport)
        else:
            transport.pause_reading()  # no byte may be taken for HTTP before TLS is there
            self._handshake = self.loop.create_task(self._begin_tls(self.guard.tls))

    async def _begin_tls(self, tls: ssl.SSLContext) -> None:
        seconds = self.guard.limits.head_seconds
        try:
            secure = await self.loop.start_tls(
                self._socket, self, tls, server_side=True, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=seconds
            )
        except OSError:  # the caller did not shake hands
            secure = None
        if secure is None:
            self._leave()
            self.abort()
            return
        super().connection_made(secure)
        self.data_received(self._early)

    def prove(self, site: str) -> None:
        """The caller has shown a known site's key: from now on the connection is among the site's own."""
        self._places.leave(self)
        self._places = self.guard.of_site(site)
        self._places.take(self, self._address)

    def abort(self) -> None:
        """Cut the connection at once."""
        self._socket.abort()

    def _wait_for_head(self) -> None:
        if self._timer is None:
            self._head = 0
            self._timer = self.loop.call_later(self.guard.limits.head_seconds, self.abort)

    def _head_is_there(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave(self) -> None:
        self._places.leave(self)
        self._head_is_there()

    def data_received(self, data: bytes) -> None:
        """Read on, within the size and time of a head where a request is yet to come."""
        if self.flow is None:  # the handshake is over, but uvicorn does not know of it yet
            self._early += data
            return
        if not data or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()
        self._head += len(data)
        super().data_received(data)
        if self._timer is not None and self._head > self.guard.limits.head_bytes:
            self.abort()

    def on_message_begin(self) -> None:
        """Let the door find this connection."""
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[typeddict-item, dict-item]

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._head_is_there()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the place."""
        self._leave()
        if self.flow is not None:
            super().connection_lost(exc)
