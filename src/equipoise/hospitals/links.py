"""How this machine reaches a SuperLink or SuperNode, and talks to it outside a run."""

from __future__ import annotations

import logging
import ssl
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.date import now
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufClientInterceptor, ProtobufRequestContext
from flwr.supercore.runtime import RuntimeHttpClient

from equipoise.core.errors import UserError
from equipoise.hospitals.door import NAME, WRONG_CLOCK

logging.getLogger("httpx").setLevel(logging.WARNING)

#: what a site that is not let in can do
ASK_COORDINATOR = "ask the coordinator to add this site's public key to the server's file and to start the server again"
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


class _Bearer:
    """Tells the token of the Control API with each request."""

    def __init__(self, token: str):
        self._token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the token, and go on."""
        context.request.headers["authorization"] = f"Bearer {self._token}"
        return call_next(context)


@dataclass(frozen=True)
class Link:
    """How to reach a SuperLink or SuperNode.

    Attributes:
        ca: the certificate that vouches for it; None for plain HTTP
        secret: for taking tasks
        token: opens the Control API
    """

    address: str
    ca: Path | None = None
    secret: bytes | None = None
    token: str | None = None

    @property
    def insecure(self) -> bool:
        """Whether the connection is plain HTTP."""
        return self.ca is None

    @property
    def url(self) -> str:
        """The address with its scheme."""
        return f"{'http' if self.insecure else 'https'}://{self.address}"

    def healthy(self, timeout: float = 2.0) -> str | None:
        """None when Flower answers at the address, else what is wrong."""
        try:
            answer = self.get("/health", timeout=timeout)
        except (httpx.HTTPError, OSError) as problem:
            return str(problem) or type(problem).__name__
        return None if answer.status_code == httpx.codes.OK else f"it answers {answer.status_code} to /health"

    def get(self, path: str, headers: Mapping[str, str] | None = None, timeout: float = 10.0) -> httpx.Response:
        """The answer to a plain question."""
        trust = ssl.create_default_context(cafile=self.ca) if self.ca else False
        return httpx.get(f"{self.url}{path}", headers=headers, verify=trust, timeout=timeout)

    def certificates(self) -> bytes | None:
        """The CA's certificate, as Flower takes it."""
        return self.ca.read_bytes() if self.ca else None

    def runtime(self, token: str | None = None) -> RuntimeHttpClient:
        """A client of the Runtime API: for taking tasks, or with a token for working on one."""
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec" if token is None else "flwr-clientapp")
        extra: list[ProtobufClientInterceptor] = []
        if token is not None:
            extra.append(RuntimeTokenHttpInterceptor(token))
        elif self.secret is not None:
            extra.append(SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=_ACQUIRE))
        extra.insert(0, version)
        return RuntimeHttpClient.from_server_address(self.address, self.insecure, self.certificates(), extra)

    def control(self) -> ControlHttpClient:
        """A client of the Control API."""
        extra: list[ProtobufClientInterceptor] = [RuntimeVersionHttpInterceptor(component_name="flwr-cli")]
        if self.token is not None:
            extra.append(_Bearer(self.token))
        return ControlHttpClient.from_server_address(self.address, self.insecure, self.certificates(), extra)


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink of ours: where hospitals reach it, and where only this machine's server does."""

    public: Link
    private: Link

    @property
    def insecure(self) -> bool:
        """Whether it does without TLS, keys and signatures."""
        return self.public.insecure


def register_nodes(link: Link, keys: Mapping[str, Sequence[bytes]]) -> None:
    """Let the nodes with these public keys in; a new SuperLink knows none."""
    client = link.control()
    try:
        for site, own in keys.items():
            for key in own:
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=site))
    finally:
        client.close()


def known_name(link: Link, key: ec.EllipticCurvePrivateKey) -> str:
    """The name that the server has for a site's key; only the key's owner gets an answer.

    Raises:
        UserError: when the server does not know the key, or this machine's clock is wrong
    """
    stamp = now().isoformat()
    headers = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode("ascii"),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, stamp.encode("ascii"))).decode("ascii"),
        TIMESTAMP_HEADER: stamp,
    }
    answer = link.get(NAME, headers)
    if answer.status_code == httpx.codes.OK:
        return answer.text
    if answer.content == WRONG_CLOCK:
        raise UserError("this machine's clock and the server's differ by more than a few minutes; set the clock")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise UserError(f"the server does not know this site's key; {ASK_COORDINATOR}")
    raise UserError(f"the server at {link.url} answers {answer.status_code}; it may be of another version of Equipoise")
