"""A stranger and a member at a running SuperLink, with TLS and the CA's certificate in hand: nobody gets in."""

from __future__ import annotations

import datetime
import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, make_dataclass
from importlib import import_module
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from fastapi.routing import iter_route_contexts
from flwr.app import Message
from flwr.common.constant import HEARTBEAT_MAX_INTERVAL
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER, TaskType
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink import config_loader

from consortium import wait_for
from equipoise.contract.protocol import SiteFailure
from equipoise.core.errors import UserError
from equipoise.hospitals import links
from equipoise.hospitals import superlink as superlink_process
from equipoise.hospitals.connections import Limits
from equipoise.hospitals.coordinator import running_superlink
from equipoise.hospitals.deployment_files import ServerFile, SiteFile
from equipoise.hospitals.door import ACTIVATE, AT_A_TIME, FLEET, FRESH_SECONDS, LARGEST_BODY, NAME, WRONG_CLOCK
from equipoise.hospitals.flower_api import server_grid
from equipoise.hospitals.links import Link, SuperLink
from equipoise.hospitals.parcels import prepare, seal
from equipoise.hospitals.pilot import make_certificates
from equipoise.hospitals.post import GridPost
from equipoise.hospitals.processes import free_port, start_supernode
from equipoise.hospitals.records import from_records, to_records
from equipoise.hospitals.security import keep_private, new_key_pair, node_keys, private_key, reply_signer, write_secret
from equipoise.hospitals.security import signer as coordinators
from equipoise.hospitals.site import check_admission
from equipoise.hospitals.superlink import SuperLinkSettings, flowers_app, fresh_database
from knocking import Answer, Caller, head, is_cut, push_reply, raw_connection

SITES = ("hospital a", "hospital b", "hospital c")
LIMITS = Limits(strangers=20, site=10, head_seconds=4.0, request_seconds=5.0)
LONG = 60.0
#: on the server's own port Flower tells anybody that there is no login
LOGIN = {f"/v1/control/{name}" for name in ("get-login-details", "get-auth-tokens", "refresh-auth-tokens")}


@dataclass
class Place:
    """A running SuperLink with a run, its sites' keys, and the numbers of their nodes."""

    server: Path
    files: dict[str, Path]
    superlink: SuperLink
    grid: Grid | None = None
    nodes: dict[str, int] = field(default_factory=dict)

    @property
    def run_id(self) -> int:
        """The run that the SuperLink is in the middle of."""
        assert self.grid is not None
        return self.grid.run.run_id

    def caller(self, site: str | None = None) -> Caller:
        """The owner of a site's key, or somebody without any."""
        key = private_key(self.files[site].parent / "node.key") if site else None
        return Caller(self.superlink.public, key)

    def node(self, site: str) -> int:
        """The number that Flower gave a site's node, which the member's own key may ask for."""
        if site not in self.nodes:
            caller = self.caller(site)
            assert caller.key is not None
            key = public_key_to_bytes(caller.key.public_key())
            request = ActivateNodeRequest(public_key=key, heartbeat_interval=HEARTBEAT_MAX_INTERVAL)
            answer = caller.ask("POST", ACTIVATE, request.SerializeToString())
            assert answer.status == 200
            self.nodes[site] = ActivateNodeResponse.FromString(answer.body).node_id
        return self.nodes[site]

    def known(self) -> tuple[set[tuple[str, int, str]], set[tuple[int, str]]]:
        """All nodes and runs, as the server itself sees them."""
        control = self.superlink.private.control()
        try:
            nodes = control.ListNodes(ListNodesRequest()).nodes_info
            runs = control.ListRuns(ListRunsRequest()).run_dict
        finally:
            control.close()
        return {(n.name, n.node_id, n.status) for n in nodes}, {(i, r.status.status) for i, r in runs.items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    """A SuperLink with two sites' keys, that is in the middle of a run."""
    folder = tmp_path_factory.mktemp("door") / "consortium"
    server, files = make_certificates(folder, f"127.0.0.1:{free_port()}", ["localhost"], SITES)
    with running_superlink(ServerFile.read(server), False, LIMITS) as superlink, server_grid(superlink.private) as grid:
        yield Place(server, files, superlink, grid)


@pytest.fixture(scope="module")
def routes(tmp_path_factory) -> list[tuple[str, str]]:
    """Every method and path of Flower's app."""
    folder = tmp_path_factory.mktemp("routes")
    settings = SuperLinkSettings("127.0.0.1", 1, 2, "token", "00", str(folder), {"key": "site"}, "certificate")
    with fresh_database(folder) as database:
        found = [context.route for context in iter_route_contexts(flowers_app(settings, database).routes)]
    routes = sorted({(method, route.path) for route in found for method in route.methods})
    assert len(routes) > 70 and {path for _, path in routes} >= FLEET
    return routes


def spellings(path: str) -> list[str]:
    """A path, and ways of writing it that some servers take for the same."""
    first, _, rest = path[1:].partition("/")
    return [
        path,
        f"/{first}%2f{rest}",
        f"/{first}%2F{rest}",
        f"/%{ord(first[0]):02x}{first[1:]}/{rest}",
        f"/{path}",
        f"{path}/",
        f"/x/..{path}",
        f"/.{path}",
        f"{path}?x=1",
        f"{path};x",
        path.upper(),
        f"http://localhost{path}",
        f"https://127.0.0.1/%2f..{path}",
    ]


def attempts(place: Place, path: str) -> list[bytes]:
    """Bodies that would do harm at a path, and an empty one."""
    (node, *_), own = sorted(place.known()[0]), ec.generate_private_key(ec.SECP384R1())
    key = public_key_to_bytes(own.public_key())
    requests = {
        "/v1/control/register-node": RegisterNodeRequest(public_key=key, name="mine"),
        "/v1/control/unregister-node": UnregisterNodeRequest(node_id=node[1]),
        "/v1/control/stop-run": StopRunRequest(run_id=place.run_id),
        "/v1/fleet/register-node": RegisterNodeFleetRequest(public_key=key),
        "/v1/fleet/unregister-node": UnregisterNodeFleetRequest(node_id=node[1]),
        "/v1/fleet/activate-node": ActivateNodeRequest(public_key=key, heartbeat_interval=30.0),
        "/v1/fleet/deactivate-node": DeactivateNodeRequest(node_id=node[1]),
    }
    return [requests[path].SerializeToString()] if path in requests else [b""]


def targets(routes: list[tuple[str, str]], usual: int) -> Iterator[tuple[str, str, str]]:
    """Method, path and target of requests: a few spellings of every route, and all spellings of one in each API."""
    tried: set[str] = set()
    for method, path in routes:
        api = path.rpartition("/")[0]
        for target in spellings(path)[: usual if api in tried else None]:
            yield method, path, target
        tried.add(api)


def refused(answer: Answer, path: str) -> bool:
    """Whether an answer is the door's refusal: that there is no such path, or that this key may not go on."""
    if path == ACTIVATE and answer.body:
        told = json.loads(answer.body)
        return told["code"] == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED and "hospital" not in str(told)
    return answer in ([Answer(401), Answer(404)] if path in FLEET else [Answer(404)])


def test_the_same_requests_reach_control_on_the_servers_own_port_with_its_token(place):
    """So that a refusal below is due to the door, and not to how these callers speak."""
    token = (("Authorization", f"Bearer {place.superlink.private.token}"),)
    answer = Caller(place.superlink.private).ask("POST", "/v1/control/list-nodes", more=token)
    assert answer.status == 200 and all(site.encode() in answer.body for site in SITES)


@pytest.mark.parametrize("who", ["nobody", "own key"])
def test_a_stranger_gets_nowhere_on_any_route(place, routes, who):
    key = ec.generate_private_key(ec.SECP384R1()) if who == "own key" else None
    stranger, before = Caller(place.superlink.public, key), place.known()
    for method, path, target in targets(routes, 2 if key is None else 1):
        for body in attempts(place, path):
            answer = stranger.ask(method, target, body)
            assert refused(answer, path) or (path == "/health" and not answer.body), (method, target, answer)
    assert place.known() == before


def test_a_member_reaches_no_route_but_those_of_a_supernode(place, routes):
    member, before = place.caller("hospital a"), place.known()
    for method, path, target in targets([route for route in routes if route[1] not in {*FLEET, "/health"}], 1):
        for body in attempts(place, path):
            assert member.ask(method, target, body) == Answer(404), (method, target)
    assert place.known() == before


# ---- signatures ------------------------------------------------------------------------------------------------


def test_a_known_key_is_told_its_own_name_and_nobody_else_any(place):
    for site in SITES:
        assert place.caller(site).ask("GET", NAME) == Answer(200, site.encode())
    assert place.caller().ask("GET", NAME) == Answer(401)


def test_a_signature_counts_once_and_while_it_is_fresh(place):
    member = place.caller("hospital a")
    once = member.signature()
    assert [member.ask("GET", NAME, signed=once).status for _ in range(2)] == [200, 401]
    for age in (FRESH_SECONDS + 1, -60.0):
        assert member.ask("GET", NAME, signed=member.signature(age)) == Answer(401, WRONG_CLOCK)


def test_a_signature_that_is_not_the_keys_is_refused(place):
    member, other = place.caller("hospital a"), place.caller("hospital b")
    pretends = Caller(member.link, other.key, member.key.public_key())
    assert pretends.ask("GET", NAME) == Answer(401)
    (key, signature, stamp), (other_key, other_signature, _) = member.signature(), other.signature()
    broken = [
        (key, other_signature, stamp),
        (key, signature),
        (key, signature, stamp, stamp),
        (key, signature, stamp, other_key),
        (key, (FLEET_HTTP_SIGNATURE_HEADER, "%%%"), stamp),
        (("flwr-public-key", ""), signature, stamp),
        (key, signature, (stamp[0], "yesterday")),
        (key, signature, (stamp[0], stamp[1] + "\xff")),
    ]
    for signed in broken:
        assert member.ask("GET", NAME, signed=signed) == Answer(401), signed
    assert member.ask("GET", NAME, signed=(key, signature, stamp)).status == 200


def test_a_member_cannot_act_for_another_sites_node(place):
    member, other = place.caller("hospital a"), Node(node_id=place.node("hospital b"))
    before = place.known()
    for name, request in (
        ("pull-messages", PullMessagesRequest(node=other)),
        ("send-node-heartbeat", SendNodeHeartbeatRequest(node=other, heartbeat_interval=1.0)),
        ("deactivate-node", DeactivateNodeRequest(node_id=other.node_id)),
    ):
        for host in ("localhost", "localhost/v1/control/x?", "x@y/%2e%2e#", ""):
            for target in (f"/v1/fleet/{name}", f"https://h/v1/fleet/{name}", f"/v1/fleet/{name}?x=/v1/control/"):
                answer = member.ask("POST", target, request.SerializeToString(), host=host)
                assert answer.status == 401, (name, host, target, answer)
    assert place.known() == before and ("hospital b", other.node_id, "online") in before[0]


def test_a_site_is_told_in_words_why_it_is_not_let_in(place, monkeypatch):
    key = place.files["hospital a"].parent / "node.key"
    known = {"name": "hospital a", "superlink": place.superlink.public.address, "ca": place.superlink.public.ca}
    settings = SiteFile.model_construct(**known, key=key)
    check_admission(settings)
    with pytest.raises(UserError, match="name = 'b', but the server knows this site's key as 'hospital a'"):
        check_admission(settings.model_copy(update={"name": "b"}))
    late = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="clock and the server's differ"):
        patch.setattr(links, "now", lambda: late)
        check_admission(settings)
    new_key_pair(key.with_name("new.key"), key.with_name("new.pub"))
    with pytest.raises(UserError, match="does not know this site's key; ask the coordinator"):
        check_admission(settings.model_copy(update={"key": key.with_name("new.key")}))


# ---- replies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signer", "again", "told"),
    [
        ("hospital b", False, None),
        ("hospital a", False, "not signed with the site's key"),
        (None, False, "not signed with the site's key"),
        ("hospital b", True, "not signed with the site's key"),
    ],
    ids=["its own", "a member's", "nobody's", "an earlier one"],
)
def test_no_member_speaks_in_another_sites_name(place, signer, again, told):
    """Flower lets a member push a reply that says it is from another node; such a reply is not believed."""
    sign = reply_signer(place.files[signer].parent / "node.key") if signer else lambda reply, question: reply
    member, node, answered = place.caller("hospital a"), place.node("hospital a"), []
    place.node("hospital b")

    class Forging:
        """The grid, and a member who answers all that is asked of hospital b."""

        get_nodes, pull_messages = place.grid.get_nodes, place.grid.pull_messages

        def push_messages(self, messages):
            numbers = place.grid.push_messages(messages)
            if not (again and answered):
                answered.append(sign(seal(prepare({}), text="forged"), from_records(messages[0].content)))
            push_reply(member, node, Message(to_records(answered[-1]), reply_to=messages[0]), place.run_id)
            return numbers

    keys = {site: node_keys(path) for site, path in ServerFile.read(place.server).sites.items()}
    post = GridPost(Forging(), keys, coordinators(place.server.parent / "coordinator.key"))
    asked = [("hospital b", seal(prepare({}), action="train"))]
    for reply in [post.exchange(asked, LONG)[0] for _ in range(1 + again)][-1:]:
        if told is None:
            assert reply.header["text"] == "forged"
        else:
            assert isinstance(reply, SiteFailure) and told in str(reply)


# ---- sizes, times, numbers -------------------------------------------------------------------------------------


def test_nothing_is_read_of_a_body_before_the_key_is_known(place):
    """The head alone brings the answer, whatever it says of the body that is to come."""
    for length in (600 << 20, LARGEST_BODY + 1):
        assert place.caller().ask("POST", "/v1/fleet/push-object", length=length) == Answer(401)
        assert place.caller("hospital a").ask("POST", "/v1/fleet/push-object", length=length) == Answer(413)


def test_a_body_without_a_length_or_with_two_is_refused(place):
    member = place.caller("hospital a")
    for lengths in ([("Transfer-Encoding", "chunked")], [("Content-Length", "3"), ("Content-Length", "4")], []):
        top = head("POST", "/v1/fleet/pull-messages", [("Host", "x"), *member.signature(), *lengths])
        assert member.send(top + b"3\r\nabc\r\n0\r\n\r\n").status in (400, 411), lengths


@pytest.mark.parametrize(
    "content",
    [
        b"GET /health HTTP/1.1\r\nX: " + b"x" * (100 << 10),
        b"GET /" + b"x" * (100 << 10),
        b"\x00\xff" * 4096,
        b"\r\n" * 50_000,
    ],
    ids=["long header", "long path", "garbage", "blank lines"],
)
def test_a_head_that_is_too_large_or_none_is_cut_off(place, content):
    assert place.caller().send(content).status in (None, 400)
    assert place.caller("hospital a").ask("GET", NAME).status == 200


def test_half_open_connections_do_not_keep_a_site_out_and_are_cut_in_time(place):
    with ExitStack() as stack:
        silent = [stack.enter_context(raw_connection(place.superlink.public)) for _ in range(40)]
        begun = [stack.enter_context(place.caller().connected()) for _ in range(5)]
        for line in begun:
            line.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\n")
        assert place.caller("hospital a").ask("GET", NAME).status == 200
        assert sum(map(is_cut, silent)) >= len(silent) + len(begun) - LIMITS.strangers
        wait_for(lambda: all(map(is_cut, [*silent, *begun])), LONG, "the end of half-open connections")


def test_truncated_requests_hold_up_nobody_else_and_are_cut_in_time(place):
    member, body = place.caller("hospital a"), PullMessagesRequest(node=Node(node_id=place.node("hospital a")))
    with ExitStack() as stack:
        lines = [stack.enter_context(member.connected()) for _ in range(AT_A_TIME)]
        for line in lines:
            top = [("Host", "x"), ("Content-Length", "1000"), *member.signature()]
            line.sendall(head("POST", "/v1/fleet/pull-messages", top) + b"only a little")
        lines.pop().close()
        assert place.caller("hospital b").ask("GET", NAME).status == 200
        wait_for(lambda: all(map(is_cut, lines)), LONG, "the end of truncated requests")
    assert member.ask("POST", "/v1/fleet/pull-messages", body.SerializeToString()).status == 200


# ---- this machine's own port -----------------------------------------------------------------------------------


def test_who_does_not_know_the_token_commands_nothing_on_the_servers_own_port(place, routes):
    before = place.known()
    guess = (("Authorization", "Bearer guessed"),)
    for caller in (Caller(place.superlink.private), Caller(place.superlink.private, place.caller("hospital a").key)):
        for method, path, target in targets([route for route in routes if "/v1/fleet" not in route[1]], 1):
            if path in LOGIN or not path.startswith("/v1/"):
                continue
            for body in attempts(place, path):
                for more in ((), guess):
                    status = caller.ask(method, target, body, more=more).status
                    assert status in (307, 400, 401, 403, 404), (method, target, status)
    assert place.known() == before


def test_another_account_of_a_hospitals_machine_takes_no_task_from_its_supernode(place, tmp_path):
    write_secret(tmp_path / "secret", b"s" * 32)
    keys, port = place.files["hospital c"].parent, free_port()
    settings = SiteFile.model_construct(
        superlink=place.superlink.public.address, ca=keys / "ca.crt", key=keys / "node.key", state=tmp_path, poll=1.0
    )
    own = Link(f"127.0.0.1:{port}", None, b"s" * 32)
    with start_supernode(settings, False, port, tmp_path / "secret") as node:
        wait_for(lambda: own.healthy() is None, LONG, f"the SuperNode's start: {node.tail()}")
        asked = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        for link in (Link(own.address), Link(own.address, None, b"x" * 32)):
            client = link.runtime()
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                client.AcquireTask(asked)
            client.close()
        client = own.runtime()
        assert client.AcquireTask(asked).token == ""  # the site itself is heard, but there is nothing to do
        client.close()


def test_a_site_talks_to_no_server_but_its_consortiums(place, tmp_path):
    other = make_certificates(tmp_path / "other", "127.0.0.1:1", ["localhost"], ["a"])[0]
    assert "certificate verify failed" in str(Link(place.superlink.public.address, other.parent / "ca.crt").healthy())
    plain = Link(place.superlink.public.address).healthy()
    assert plain is not None and "certificate" not in plain


# ---- what lies on the server's disk, and who is let in ---------------------------------------------------------


def test_a_site_can_be_taken_out_and_put_back_and_no_database_outlives_its_superlink(tmp_path):
    files = make_certificates(tmp_path / "c", f"127.0.0.1:{free_port()}", ["localhost"], SITES)
    whole = ServerFile.read(files[0])
    without = whole.model_copy(update={"sites": {"hospital a": whole.sites["hospital a"]}})
    keep_private(whole.state)
    (whole.state / "superlink.db").write_bytes(b"what a killed server left")
    for settings in (whole, without, whole):
        with running_superlink(settings, False, LIMITS) as superlink:
            place = Place(*files, superlink)
            assert {name for name, _, _ in place.known()[0]} == set(settings.sites)
            told = {site: place.caller(site).ask("GET", NAME).status for site in SITES}
            assert told == {site: 200 if site in settings.sites else 401 for site in SITES}
            assert {path.name for path in whole.state.glob("superlink.*")} >= {"superlink.db", "superlink.json"}
            assert not [path for path in (whole.state, *whole.state.glob("superlink.[!l]*")) if mode(path) & 0o077]
        assert {path.name for path in whole.state.iterdir()} <= {"superlink.log", ".lock"}


@pytest.mark.parametrize("lacking", ["class", "field", "path"])
def test_a_flower_that_lacks_what_the_door_builds_on_stops_the_server_in_words(tmp_path, monkeypatch, lacking):
    if lacking == "class":
        monkeypatch.delattr(import_module("flwr.superlink.cli.flower_superlink"), "SuperLinkLifespan")
    elif lacking == "field":
        monkeypatch.setattr(config_loader, "SuperLinkLifespanConfig", make_dataclass("Other", ["host", "port"]))
    else:
        monkeypatch.setattr(superlink_process, "FLEET", FLEET | {"/v1/fleet/new-call"})
    (tmp_path / "file").write_text(SuperLinkSettings("127.0.0.1", 1, 2, "token", "00", str(tmp_path), {}).to_json())
    monkeypatch.setattr(sys, "argv", ["superlink", str(tmp_path / "file")])
    before = signal.getsignal(signal.SIGTERM), os.umask(0o077)
    try:
        with pytest.raises(SystemExit, match=r"starts its SuperLink in another way .*Equipoise knows 1\.41"):
            superlink_process.main()
    finally:
        signal.signal(signal.SIGTERM, before[0])
        os.umask(before[1])


def test_a_run_that_is_stopped_at_the_superlink_says_who_could_stop_it(tmp_path):
    server, _ = make_certificates(tmp_path / "c", f"127.0.0.1:{free_port()}", ["localhost"], SITES)
    told = pytest.raises(UserError, match=r"with the token of .* stopped the run through the SuperLink's Control API")
    with running_superlink(ServerFile.read(server), False) as superlink, told, server_grid(superlink.private) as grid:
        control = superlink.private.control()
        assert control.StopRun(StopRunRequest(run_id=grid.run.run_id)).success
        control.close()
        while True:
            grid.get_nodes()


def mode(path: Path) -> int:
    """What a file's owner and others may do."""
    return stat.S_IMODE(path.stat().st_mode)
