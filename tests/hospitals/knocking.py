"""Callers at a running SuperLink's ports, for tests: a stranger without a key or with his own, and a member.

They speak HTTP byte by byte, so that they can also send what no client would.
"""

from __future__ import annotations

import datetime
import socket
import ssl
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import push_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from equipoise.hospitals.links import Link

PATIENCE = 30.0
Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Answer:
    """What came back: no status where the connection was cut."""

    status: int | None
    body: bytes = b""


@dataclass(frozen=True)
class Caller:
    """Someone who knocks.

    Attributes:
        key: signs the time; None for somebody without any key
        shown: the public key that is shown, where it is not that of `key`
    """

    link: Link
    key: ec.EllipticCurvePrivateKey | None = None
    shown: ec.EllipticCurvePublicKey | None = None

    def signature(self, age: float = 0.0) -> Headers:
        """The headers by which a SuperNode proves itself."""
        if self.key is None:
            return ()
        stamp = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).isoformat()
        public = public_key_to_bytes(self.shown or self.key.public_key())
        return (
            (FLEET_HTTP_PUBLIC_KEY_HEADER, b64encode(public).decode()),
            (FLEET_HTTP_SIGNATURE_HEADER, b64encode(sign_message(self.key, stamp.encode())).decode()),
            (TIMESTAMP_HEADER, stamp),
        )

    def ask(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        signed: Headers | None = None,
        host: str = "localhost",
        length: int | None = None,
        more: Headers = (),
    ) -> Answer:
        """Send one request, as it is; `length` is what its head says of the body."""
        headers = [
            ("Host", host),
            ("Content-Type", PROTOBUF_MEDIA_TYPE),
            ("Content-Length", str(len(body) if length is None else length)),
            *(self.signature() if signed is None else signed),
            *more,
        ]
        return self.send(head(method, target, headers) + body)

    def send(self, content: bytes) -> Answer:
        """Send bytes, and read what comes back until the other side closes."""
        with self.connected() as line:
            with suppress(OSError):  # cut while we were still sending
                line.sendall(content)
            return read_answer(line)

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """A connection, with TLS where there is a CA."""
        with raw_connection(self.link) as line:
            if self.link.ca is None:
                yield line
                return
            context = ssl.create_default_context(cafile=self.link.ca)
            with context.wrap_socket(line, server_hostname="127.0.0.1") as secure:
                yield secure


def raw_connection(link: Link) -> socket.socket:
    """A TCP connection, on which nothing is said yet."""
    host, _, port = link.address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def head(method: str, target: str, headers: Headers) -> bytes:
    """The head of a request."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def read_answer(line: socket.socket) -> Answer:
    """The answer that comes before the other side closes, or its length is reached."""
    content = b""
    with suppress(ConnectionError, ssl.SSLError):
        while piece := line.recv(1 << 16):
            content += piece
            top, blank, body = content.partition(b"\r\n\r\n")
            lengths = [row.split(b":")[1] for row in top.split(b"\r\n") if row.lower().startswith(b"content-length:")]
            if blank and lengths and len(body) >= int(lengths[0]):
                break
    top, _, body = content.partition(b"\r\n\r\n")
    return Answer(int(top.split()[1]) if top else None, body)


def is_cut(line: socket.socket) -> bool:
    """Whether the other side has closed the connection by now, without an answer."""
    line.setblocking(False)
    try:
        return line.recv(1) == b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


def push_reply(caller: Caller, node: int, reply: Message, run_id: int) -> None:
    """Push a reply by the caller's node, as a SuperNode pushes its own, whoever the reply says it is from."""
    assert caller.key is not None and caller.link.ca is not None
    signed = NodeAuthHttpInterceptor(caller.key, caller.key.public_key())
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    sender, ca = Node(node_id=node), caller.link.ca.read_bytes()
    with FleetHttpClient.from_server_address(caller.link.address, False, ca, [version, signed]) as client:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        told = client.PushMessages(
            PushMessagesRequest(
                node=sender,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
            )
        )
        push = make_push_object_fn_protobuf(client.PushObject, sender, run_id, told.session_id)
        push_objects(get_all_nested_objects(reply), push, object_ids_to_push=set(told.objects_to_push))
