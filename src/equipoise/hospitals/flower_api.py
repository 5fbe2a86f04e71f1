"""Tasks of Flower 1.41, taken by this server and this site themselves; it has no public API for that.

Flower starts a new process per message and runs the code that the server sends along. Here both sides take their tasks
from Flower themselves. A site runs only the Equipoise that its hospital installed, in a process that stays warm. The
server's process talks to the grid, so its exit status is the run's.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import sub

import httpx
from flwr.app import Context, Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import Status, SubStatus
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, SendTaskHeartbeatRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid, http_grid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from equipoise.core.errors import UserError
from equipoise.hospitals.brisk import quicken
from equipoise.hospitals.links import Link

log = logging.getLogger(__name__)

#: a run that somebody stopped through Flower's Control API
STOPPED = (
    "a program on this machine with the token of the server's `state` folder stopped the run through the SuperLink's "
    "Control API; `--resume` continues after the last complete round"
)
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


@contextmanager
def server_grid(link: Link, patience: float = 60.0) -> Iterator[Grid]:
    """Start a run at the SuperLink and be its server: the grid that reaches the nodes."""
    quicken(http_grid)
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
    heartbeat = HeartbeatSender(_beat(client))
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
        raise UserError(STOPPED) from None
    except (KeyboardInterrupt, httpx.HTTPStatusError):  # Ctrl-C, Flower itself, or a token of a run that is over
        if _is_over(link, started.run_id):
            raise UserError(STOPPED) from None
        raise
    finally:
        if heartbeat.is_running:
            heartbeat.stop()
        with suppress(httpx.HTTPError):  # of a run that is over, or a SuperLink that is gone
            push_task_output(client, context, status, details)
        grid.close()
        client.close()


def _beat(client: RuntimeHttpClient) -> Callable[[], bool]:
    """Tells that a task is being worked on. Flower's own would interrupt the whole process where the task is over."""

    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPError:
            return False
        return True

    return beat


def _is_over(link: Link, run_id: int) -> bool:
    """Whether the run has ended at the SuperLink, while its server goes on."""
    control = link.control()
    try:
        runs = control.ListRuns(ListRunsRequest(run_id=run_id)).run_dict
    except httpx.HTTPError:
        return False
    finally:
        control.close()
    return run_id in runs and runs[run_id].status.status == Status.FINISHED


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
    quicken(inflatable_utils)
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
                except Exception:  # an error with one message must not end the site
                    log.exception("a message was lost between this site and its SuperNode")
            else:
                time.sleep(interval)
    finally:
        client.close()


def _serve_one(link: Link, token: str, handle: Callable[[Message], Message]) -> None:
    """Work on one task. When that fails, its heartbeat stops: the SuperNode then tells the server within a minute. Told
    that the task has failed, it would wait for a reply for ever."""
    client = link.runtime(token)
    heartbeat = HeartbeatSender(_beat(client))
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
