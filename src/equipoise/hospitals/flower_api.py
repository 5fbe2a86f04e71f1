"""The one place that reaches into Flower 1.41 beyond its public API.

Flower starts a new process per message and runs the code that the server sends along. Here both sides take their
tasks from Flower themselves: a site runs only the Equipoise that its hospital installed, in a process that stays
warm, and the server's own process talks to the grid, so that its exit status is the run's.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import sub
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid, http_grid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from equipoise.core.errors import UserError
from equipoise.hospitals.brisk import quicken
from equipoise.hospitals.security import public_key

log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)
quicken(http_grid, inflatable_utils)

_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})

#: names the run at the SuperLink; its modules say that no code travels
_APP = {
    "pyproject.toml": b"""
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "equipoise-run"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "equipoise"
[tool.flwr.app.components]
serverapp = "equipoise_run.nothing:app"
clientapp = "equipoise_run.nothing:app"
""",
    "equipoise_run/__init__.py": b'"""Sites and server run their own Equipoise; nothing here is executed."""\n',
    "equipoise_run/nothing.py": b"app = None\n",
}


@dataclass(frozen=True)
class Link:
    """How to reach a SuperLink or SuperNode: its address, the CA that vouches for it, the secret for taking tasks."""

    address: str
    ca: Path | None = None
    secret: bytes | None = None

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
            trust = ssl.create_default_context(cafile=self.ca) if self.ca else False
            answer = httpx.get(f"{self.url}/health", verify=trust, timeout=timeout)
        except (httpx.HTTPError, OSError) as problem:
            return str(problem) or type(problem).__name__
        return None if answer.status_code == httpx.codes.OK else f"it answers {answer.status_code} to /health"

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
        version = RuntimeVersionHttpInterceptor(component_name="flwr-cli")
        return ControlHttpClient.from_server_address(self.address, self.insecure, self.certificates(), [version])


def public_key_bytes(path: Path) -> bytes:
    """A node's public key (OpenSSH file) as Flower knows it."""
    return public_key_to_bytes(public_key(path))


def register_nodes(link: Link, keys: dict[str, bytes]) -> None:
    """Let the nodes with these public keys in, and no others."""
    client = link.control()
    try:
        nodes = [node for node in client.ListNodes(ListNodesRequest()).nodes_info if node.status != "unregistered"]
        for node in nodes:
            if node.public_key not in keys.values():
                client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
        known = {node.public_key for node in nodes}
        for name, key in keys.items():
            if key not in known:
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
    finally:
        client.close()


def registered_name(link: Link, key: ec.EllipticCurvePublicKey) -> str:
    """The name that the node with this public key has at a SuperLink; empty where it has none."""
    client, wanted = link.control(), public_key_to_bytes(key)
    try:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    finally:
        client.close()
    return next((str(node.name) for node in nodes if node.public_key == wanted), "")


@contextmanager
def server_grid(link: Link, patience: float = 60.0) -> Iterator[Grid]:
    """Start a run at the SuperLink and be its server: the grid that reaches the nodes."""
    content = build_fab_from_files(_APP)[0]
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    control = link.control()
    try:
        started = control.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
    finally:
        control.close()
    token = _acquire(link, TaskType.SERVER_APP, started.run_id, patience)
    client = link.runtime(token)
    grid = HttpGrid(link.address, link.insecure, link.certificates(), token=token)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    context: Context | None = None
    status, details = SubStatus.FAILED, "the server stopped"
    try:
        task = client.PullTaskInput(PullTaskInputRequest())
        context = context_from_proto(task.context)
        # Flower stamps these on every message that the process makes.
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        yield grid
        status, details = SubStatus.COMPLETED, ""
    except RunNotRunningException:
        raise UserError(
            f"the run was ended from outside, at the SuperLink at {link.address}; `--resume` goes on"
        ) from None
    finally:
        heartbeat.stop()
        push_task_output(client, context, status, details)
        grid.close()
        client.close()


def _acquire(link: Link, kind: TaskType, run_id: int, patience: float) -> str:
    """The token of this run's task."""
    client = link.runtime()
    deadline = time.monotonic() + patience
    try:
        while time.monotonic() < deadline:
            answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
            # A task left behind by a server that died is taken off the queue and not worked on.
            if answer.token and answer.task.run_id == run_id:
                return str(answer.token)
            time.sleep(0.2)
    finally:
        client.close()
    raise TimeoutError(f"the SuperLink at {link.address} did not hand out the run within {patience:.0f} s")


def serve_tasks(
    link: Link, handle: Callable[[Message], Message], alive: Callable[[], bool], interval: float = 0.2
) -> None:
    """Take tasks from this site's SuperNode and answer them, one at a time, while `alive()`."""
    client = link.runtime()
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    try:
        while alive():
            try:
                answer = client.AcquireTask(request)
            except httpx.HTTPError:
                answer = None  # the SuperNode is not up yet, or gone: `alive` knows
            if answer is not None and answer.token:
                try:
                    _serve_one(link, str(answer.token), handle)
                except Exception:  # a site outlives whatever goes wrong with one message
                    log.exception("a message was lost between this site and its SuperNode")
            else:
                time.sleep(interval)
    finally:
        client.close()


def _serve_one(link: Link, token: str, handle: Callable[[Message], Message]) -> None:
    """Work on one task. When that fails, its heartbeat stops: the SuperNode then tells the server within a minute. Told
    that the task has failed, it would wait for a reply for ever."""
    client = link.runtime(token)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    marks = [time.perf_counter()]
    try:
        message, context, _, _ = pull_task_input(client)  # the code that came along is not looked at
        marks.append(time.perf_counter())
        reply = handle(message)
        marks.append(time.perf_counter())
        push_message(client, reply, context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
        marks.append(time.perf_counter())
        log.info("a message: %.3f s to take, %.3f s to answer, %.3f s to hand over", *map(sub, marks[1:], marks))
    finally:
        heartbeat.stop()
        client.close()
