"""The files and keys of a deployment: what is refused in words, and certificates that really vouch."""

from __future__ import annotations

import io
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr")

from cryptography import x509
from flwr.app import Array, ArrayRecord
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from equipoise.api.progress import ProgressDisplay
from equipoise.cli import hospitals as deploy_cli
from equipoise.cli.app import app
from equipoise.contract.method import Client
from equipoise.contract.protocol import SiteFailure
from equipoise.core.errors import UserError
from equipoise.hospitals import brisk, flower_api, post
from equipoise.hospitals import coordinator as server_module
from equipoise.hospitals.coordinator import check_server, conduct, running_superlink
from equipoise.hospitals.deployment_files import ServerFile, SiteFile, check_security, on_loopback
from equipoise.hospitals.descriptions import describe
from equipoise.hospitals.links import Link, SuperLink
from equipoise.hospitals.node import _BriefSleeps
from equipoise.hospitals.parcels import UnreadableParcel, prepare, seal
from equipoise.hospitals.pilot import check_running, files_of, lay_out, make_certificates
from equipoise.hospitals.policy import OPTIONAL, check_policy, check_words, policy_for
from equipoise.hospitals.post import GridPost, Unreachable
from equipoise.hospitals.processes import Child, free_port, interrupted_by_end_of
from equipoise.hospitals.records import from_records, to_records
from equipoise.hospitals.security import node_keys
from equipoise.hospitals.site import check_connection, check_site
from equipoise.methods import get_method, method_names
from harness import tiny_config, tiny_federation


def test_certificates_vouch_for_the_server_and_private_files_are_private(tmp_path):
    server, files = make_certificates(tmp_path, "0.0.0.0:8443", ["server.example.org"], ["a", "b/c"])
    authority = x509.load_pem_x509_certificate((server.parent / "ca.crt").read_bytes())
    certificate = x509.load_pem_x509_certificate((server.parent / "server.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "server.example.org" in names.get_values_for_type(x509.DNSName)
    ssl.create_default_context(cafile=server.parent / "ca.crt")
    private = [tmp_path / "ca.key", server.parent / "server.key", *(f.parent / "node.key" for f in files.values())]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private)
    known = ServerFile.read(server)
    assert {site: node_keys(path) for site, path in known.sites.items()} == {
        site: node_keys(path.parent / "node.pub") for site, path in files.items()
    }
    assert len({key for path in known.sites.values() for key in node_keys(path)}) == 2


def test_a_second_consortium_does_not_overwrite_the_first(tmp_path):
    make_certificates(tmp_path, "0.0.0.0:8443", ["localhost"], ["a"])
    with pytest.raises(UserError, match="already"):
        make_certificates(tmp_path, "0.0.0.0:8443", ["localhost"], ["a"])


@pytest.mark.parametrize(
    ("hosts", "sites", "told"),
    [
        (["https://server.example.org:8443"], ["a"], "no host name"),
        (["server"], ["a", "b", "a"], "two sites are called 'a'"),
        (["server"], [" "], "needs a name"),
    ],
)
def test_wrong_names_are_refused_before_a_file_is_written(tmp_path, hosts, sites, told):
    with pytest.raises(UserError, match=told):
        make_certificates(tmp_path / "consortium", "0.0.0.0:8443", hosts, sites)
    assert not (tmp_path / "consortium").exists()


@pytest.fixture
def server_file(tmp_path) -> Path:
    """The file of a server with two sites, at a free port."""
    return make_certificates(tmp_path / "consortium", f"127.0.0.1:{free_port()}", ["localhost"], ["a", "b"])[0]


def test_a_servers_files_are_sound(server_file):
    check_server(ServerFile.read(server_file), insecure=False)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("server.key", "other", "do not make a TLS server"),
        ("server.crt", "garbage", "do not make a TLS server"),
        ("ca.crt", "garbage", "no certificate in PEM format"),
        ("coordinator.key", "garbage", "no private key in OpenSSH's format"),
        ("nodes/b.pub", "garbage", "b.pub is no public key in OpenSSH's format"),
        ("nodes/b.pub", "nodes/a.pub", "'a' and 'b' have the same public key"),
    ],
)
def test_a_damaged_or_foreign_key_of_the_server_is_told_in_words(server_file, tmp_path, file, content, told):
    other = make_certificates(tmp_path / "other", "0.0.0.0:8443", ["localhost"], ["a"])[0].parent
    where = {"other": other / file, "nodes/a.pub": server_file.parent / content}.get(content)
    (server_file.parent / file).write_bytes(where.read_bytes() if where else content.encode())
    with pytest.raises(UserError, match=told):
        check_server(ServerFile.read(server_file), insecure=False)


def test_a_port_in_use_is_told_before_anything_starts(server_file):
    settings = ServerFile.read(server_file)
    host, port = settings.address.split(":")
    with socket.create_server((host, int(port))), pytest.raises(UserError, match=r"cannot listen at .* in use"):
        running_superlink(settings, insecure=False).__enter__()
    assert not settings.state.exists()


@pytest.fixture
def site_file(tmp_path) -> Path:
    """The file of site 1 of a tiny pilot."""
    return lay_out(tmp_path / "pilot", tiny_config("fedavg"))[1]["site 1"]


def test_a_pilots_files_are_sound(site_file):
    federation = check_site(SiteFile.read(site_file), insecure=False)
    assert "site 1" in {site.name for site in federation.sites}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "site 1"', 'name = "site 9"', "no site 'site 9'; its sites: site 1, site 2, site 3"),
        ('key = "node.key"', 'key = "lost.key"', "lost.key: no such file"),
        ('key = "node.key"', "", "no key"),
        ('key = "node.key"', 'kee = "node.key"', "kee: unknown key"),
        ("[policy]", "[policy]\n[unused]", "unused: unknown key"),
        ('device = "auto"', 'device = "tpu"', "no device"),
        ("\ntrain = ", "\ntrian = ", "no method has an action 'trian'; did you mean 'train'"),
        ('"examples"', '"examples2"', "no method sends 'examples2' in .*; did you mean 'examples'"),
        ("\ndescribe = ", "\nscan = ", "no method has an action 'scan'; known are .*describe"),
        ('describe = [\n    "counts",\n]\n', "", "every run needs 'counts' in 'describe'"),
    ],
)
def test_a_mistake_in_a_sites_file_is_told_in_words(site_file, old, new, told):
    text = site_file.read_text()
    assert old in text
    site_file.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=told):
        check_site(SiteFile.read(site_file), insecure=False)


@pytest.mark.parametrize(
    ("file", "told"),
    [("node.key", "no private key"), ("coordinator.pub", "no public key"), ("ca.crt", "no certificate in PEM")],
)
def test_a_damaged_key_of_a_site_is_told_in_words(site_file, file, told):
    (site_file.parent / file).write_text("garbage")
    with pytest.raises(UserError, match=told):
        check_site(SiteFile.read(site_file), insecure=False)


def test_a_server_that_is_not_there_is_told_in_words(site_file):
    with pytest.raises(UserError, match=r"cannot reach the SuperLink at https://127.0.0.1:.*firewall"):
        check_connection(SiteFile.read(site_file), insecure=False)


def test_a_file_that_is_not_utf8_is_refused_with_its_line(site_file):
    site_file.write_bytes("# Hôpital\n".encode("latin-1") + site_file.read_bytes())
    with pytest.raises(UserError, match=rf"{site_file.name}, line 1: the text is not UTF-8"):
        SiteFile.read(site_file)
    with pytest.raises(UserError, match="cannot read"):
        SiteFile.read(site_file.parent)


@pytest.mark.parametrize("address", ["10.0.0.1:8443", "hospital.example.org:8443", "0.0.0.0:8443"])
def test_insecure_is_for_loopback_only(site_file, address):
    settings = SiteFile.read(site_file)
    check_security(settings, "127.0.0.1:8443", insecure=True)
    with pytest.raises(UserError, match="only for this machine"):
        check_security(settings, address, insecure=True)
    assert not on_loopback(address)


def test_a_hospital_may_lack_a_class_and_its_folder_may_have_any_name(tmp_path, site_file):
    for name in ("nevus", "melanoma"):
        for number in range(20):
            path = tmp_path / "images" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (number, 10 * number, 0)).save(path)
    before = site_file.read_text().partition("[data]")[0]
    classes = 'classes = ["nevus", "melanoma", "keratosis"]'
    store = f'store = "{tmp_path / "store"}"'
    site_file.write_text(f'{before}[data]\nname = "folder:{tmp_path / "images"}"\nsize = 16\n{classes}\n{store}\n')
    federation = check_site(SiteFile.read(site_file), insecure=False)
    assert [site.name for site in federation.sites] == ["site 1"]
    assert federation.sites[0].class_counts(3).tolist()[2] == 0


def client_of(method: str, *settings: str) -> type[Client]:
    """The client of a run, with its components."""
    return get_method(method).client_class(tiny_config(method, *settings))


@pytest.mark.parametrize("method", method_names())
def test_a_methods_own_policy_names_everything_on_its_disclosure_sheet(method):
    client = client_of(method)
    policy = policy_for(client)
    assert {"describe", "evaluate"} <= policy.keys()
    assert policy["progress"] == sorted(OPTIONAL["progress"])
    for action, entries in client.discloses.items():
        assert sorted(entries) == policy.get(action, [])


@pytest.mark.parametrize("method", method_names())
def test_the_policy_of_every_method_is_in_known_words(method):
    check_words(policy_for(client_of(method)))


@pytest.mark.parametrize(
    ("method", "setting", "action", "entry"),
    [
        ("prr", "prr.global_view=true", "train", "norm"),
        ("prr", "prr.prototype_exchange=epoch", "epoch", "prototypes"),
        ("fedavg", "components=['margins']", "margins.survey", "class_loss"),
        ("fedavg", "components=['cpa']", "train", "cpa.prototypes"),
        ("fedavg", "components=['cpa']", "cpa.counts", "class_counts"),
    ],
)
def test_what_options_and_components_add_has_its_words_too(method, setting, action, entry):
    plain, policy = policy_for(client_of(method)), policy_for(client_of(method, setting))
    assert entry in policy[action] and entry not in plain.get(action, [])
    check_words(policy)
    with pytest.raises(UserError, match=rf"this site's policy refuses the method.*{action}\.{entry}"):
        check_policy(plain, method, client_of(method, setting))


def test_a_policy_does_not_ask_for_what_options_leave_out():
    policy = policy_for(client_of("prr", "prr.cpa_global=false", "prr.cpa_local=false"))
    assert "counts" not in policy and policy["train"] == ["examples", "model"]
    check_policy(policy, "prr", client_of("prr", "prr.cpa_global=false", "prr.cpa_local=false"))
    with pytest.raises(UserError, match=r"train\.prototypes, .*counts\.class_counts"):
        check_policy(policy, "prr", client_of("prr"))


def test_words_of_a_class_that_no_method_uses_are_not_known():
    made = type("Unregistered", (client_of("fedavg"),), {"discloses": {"train": {"diary": "what was seen"}}})
    policy = policy_for(client_of("fedavg"))
    with pytest.raises(UserError, match="no method sends 'diary' in 'train'"):
        check_words(policy | {"train": [*policy["train"], *made.discloses["train"]]})


@pytest.mark.parametrize("port", ["99999", "0", "-1", "x", "65536"])
@pytest.mark.parametrize(("kind", "key"), [(SiteFile, "superlink"), (ServerFile, "address")])
def test_a_port_that_cannot_be_is_refused_with_its_key(server_file, site_file, kind, key, port):
    file = {SiteFile: site_file, ServerFile: server_file}[kind]
    file.write_text(re.sub(rf'{key} = ".*"', f'{key} = "127.0.0.1:{port}"', file.read_text()))
    with pytest.raises(UserError, match=rf"{key}: '127.0.0.1:{port}' is no address.*1 to 65535"):
        kind.read(file)


class RestartedSite:
    """A post at which site b, just restarted, cannot be reached at first."""

    def __init__(self, descriptions, failures):
        self.descriptions, self.failures, self.asked = descriptions, failures, []

    def gather(self, sites, enough, patience):
        return []

    def describe(self, sites, **fields):
        self.asked.append(list(sites))
        return [self.reply(site) for site in sites]

    def reply(self, site):
        if site == "b" and self.failures:
            return self.failures.pop(0)
        return seal(prepare({}), description=self.descriptions[site])


class Noted:
    """An observer that remembers warnings."""

    def __init__(self):
        self.warnings = []

    def event(self, event, **fields):
        self.warnings += [fields["text"]] if event == "warning" else []


@pytest.fixture
def asked_of(server_file, monkeypatch):
    """Ask sites a and b what data they have; gives their descriptions, the post and an observer."""
    monkeypatch.setattr(server_module, "LOOK_SECONDS", 0.0)
    config = tiny_config("fedavg")
    known = describe("site 1", tiny_federation(config))

    def ask(*failures, wait=60.0, **says):
        told = {name: known | {"site": says.get(name, name)} for name in "ab"}
        settings = ServerFile.read(server_file).model_copy(update={"wait": wait})
        site, observer = RestartedSite(told, list(failures)), Noted()
        waiting = server_module._Wait(site, ("a", "b"), [observer], lambda: None)
        return server_module._descriptions(config, settings, site, waiting), site, observer

    return ask


def test_a_site_that_was_restarted_is_asked_again_what_data_it_has(asked_of):
    told, site, observer = asked_of(Unreachable("Node Unavailable"), Unreachable("it is not connected"))
    assert [description["site"] for description in told] == ["a", "b"]
    assert site.asked == [["a", "b"], ["b"], ["b"]]
    assert observer.warnings[0] == "b has to describe its data again: Node Unavailable"


def test_asking_again_ends_with_the_wait_and_a_site_that_refuses_is_not_asked_again(asked_of):
    with pytest.raises(UserError, match="b did not say what data it has: Node Unavailable"):
        asked_of(*[Unreachable("Node Unavailable")] * 2, wait=1e-9)
    with pytest.raises(UserError, match="b does not take part: no"):
        asked_of(seal(prepare({}), error="no"), Unreachable("never asked"))
    with pytest.raises(UserError, match="b did not say what data it has: garbage"):
        asked_of(SiteFailure("garbage"), Unreachable("never asked"))


def test_a_node_that_says_another_name_than_its_keys_is_refused_with_both(asked_of):
    with pytest.raises(UserError, match="the site with the key of 'b' says that it is 'z'"):
        asked_of(b="z")


@pytest.mark.parametrize(("code", "kind"), [(5, Unreachable), (3, Unreachable), (1, SiteFailure)])
def test_a_node_that_flower_could_not_reach_is_told_from_one_that_failed(messages, code, kind):
    reply = reply_to("message 1")
    reply.error.code = code
    (failure,) = GridPost(FakeGrid(lambda ids: [reply]), {})._deliver([(1, seal(prepare({})))], 30.0)
    assert type(failure) is kind


def test_more_answers_than_there_are_sites_are_refused_before_anything_starts(server_file, tmp_path):
    asked = ["--set", "train.min_sites=5", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["server", str(server_file), *asked])
    assert "train.min_sites = 5, but the server's file names 2 sites" in str(result.exception)
    assert not ServerFile.read(server_file).state.exists()


def test_names_are_printed_as_they_are(tmp_path):
    command = ["certificates", str(tmp_path / "[b]x"), "--host", "localhost", "--site", "ü [red]x", "--site", ":smile:"]
    lines = CliRunner().invoke(app, command).output.splitlines()
    assert lines[0] == f"server: {tmp_path / '[b]x' / 'server'}"
    assert lines[1].startswith("ü [red]x: ") and lines[2].startswith(":smile:: ")


def test_a_loss_that_no_site_tells_is_said_to_be_untold():
    console = Console(file=io.StringIO(), width=200)
    display = ProgressDisplay(console, 2, "balanced_accuracy", "run")
    display.event("round", round=1, sites={"a": {}, "b": {}}, missing={"[red]c": "gone"})
    display.event("round", round=2, sites={"[red]a": {"loss": 0.5}, "b": {}}, missing={})
    lines = console.file.getvalue().splitlines()
    assert lines[0].split() == ["round", "1", "loss", "not", "told"] and lines[1] == "round 1: [red]c left out: gone"
    assert lines[2].split() == ["round", "2", "loss", "[red]a", "0.500"]


def test_central_learning_is_refused_between_hospitals(tmp_path):
    server, _ = make_certificates(tmp_path, "127.0.0.1:8443", ["localhost"], ["a"])
    nowhere = Link("127.0.0.1:1")
    with pytest.raises(UserError, match="needs all images in one place"):
        conduct(tiny_config("central"), ServerFile.read(server), tmp_path / "run", SuperLink(nowhere, nowhere))


def test_a_server_does_not_start_without_the_keys_of_its_sites(tmp_path):
    server, _ = make_certificates(tmp_path, "127.0.0.1:8443", ["localhost"], ["a"])
    (server.parent / "nodes" / "a.pub").unlink()
    with pytest.raises(UserError, match="public key of 'a'"):
        running_superlink(ServerFile.read(server), insecure=False).__enter__()


def test_the_command_line_says_which_file_is_missing(tmp_path):
    result = CliRunner().invoke(app, ["server", str(tmp_path / "none.toml")])
    assert isinstance(result.exception, UserError) and "none.toml: no such file" in str(result.exception)


def test_a_run_with_hospitals_is_not_called_after_the_phantom(server_file, tmp_path, monkeypatch):
    from equipoise.cli import hospitals as cli
    from equipoise.hospitals import coordinator as server

    seen = []
    monkeypatch.setattr(cli, "_conduct", lambda config, *_: seen.append(config))
    monkeypatch.setattr(cli, "_report", lambda folder: None)
    monkeypatch.setattr(server, "started_superlink", lambda _: Child([sys.executable, "-c", WAITS], tmp_path / "log"))
    monkeypatch.setattr(server, "wait_until_healthy", lambda *_: None)
    monkeypatch.setattr(server, "register_nodes", lambda *_: None)
    for more in ([], ["--set", "data.name='ham10000'"]):
        CliRunner().invoke(app, ["server", str(server_file), "--out", str(tmp_path / "run"), *more])
    assert [config.data.name for config in seen] == ["hospitals", "ham10000"]


def test_a_pilots_files_are_found_again(tmp_path):
    laid_out = lay_out(tmp_path / "pilot", tiny_config("fedavg"))
    assert files_of(tmp_path / "pilot") == laid_out


@pytest.mark.parametrize("command", [["pilot"], ["server"]])
def test_nothing_is_written_among_other_peoples_files(server_file, tmp_path, command):
    (tmp_path / "theses").mkdir()
    (tmp_path / "theses" / "mine.doc").touch()
    more = [str(server_file)] if command == ["server"] else []
    result = CliRunner().invoke(app, [*command, *more, "--out", str(tmp_path / "theses")])
    assert isinstance(result.exception, UserError) and "holds no run" in str(result.exception)


# ---- processes -----------------------------------------------------------------------------------------

WAITS = "import time; time.sleep(60)"


@pytest.mark.parametrize("heard", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background"])
def test_a_block_ends_in_words_when_a_process_that_it_needs_ends(heard, tmp_path):
    ends = [sys.executable, "-c", "print('no memory', flush=True); raise SystemExit(3)"]
    told = r"(?s)the SuperLink ended with status 3.*--resume.*no memory"
    before = signal.signal(signal.SIGINT, heard)  # what scripts start in the background ignores SIGINT
    try:
        with (
            Child(ends, tmp_path / "log") as child,
            pytest.raises(UserError, match=told),
            interrupted_by_end_of(child, "the SuperLink"),
        ):
            time.sleep(60)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_by_the_user_stays_one(tmp_path):
    with Child([sys.executable, "-c", WAITS], tmp_path / "log") as child:
        with pytest.raises(KeyboardInterrupt), interrupted_by_end_of(child, "the SuperLink"):
            raise KeyboardInterrupt
        assert child.running


def test_a_site_that_ended_is_not_waited_for(tmp_path):
    with Child([sys.executable, "-c", "raise SystemExit('no images')"], tmp_path / "log") as child:
        child.process.wait()
        with pytest.raises(UserError, match=r"(?s)a ended with status 1.*no images"):
            check_running({"a": child})


# ---- Flower's waits ------------------------------------------------------------------------------------


def test_flower_looks_again_soon_and_gives_up_in_time(monkeypatch):
    asked = []

    def never(object_id):
        asked.append(object_id)
        raise ObjectUnavailableError(object_id)

    before = time.monotonic()
    with brisk.until(before + 0.3), pytest.raises(ObjectPullError):
        brisk.pull_objects(["x"], never)
    assert len(asked) >= 3 and time.monotonic() - before < 1.0
    monkeypatch.setattr(brisk, "STALLED", 0.2)  # nobody sets a deadline, but nothing comes
    with pytest.raises(ObjectPullError, match="nothing came"):
        brisk.pull_objects(["x"], never)


def test_pieces_that_keep_coming_are_waited_for(monkeypatch):
    monkeypatch.setattr(brisk, "STALLED", 1.0)
    began = time.monotonic()

    def slowly(object_id):
        if time.monotonic() - began < 0.25 * int(object_id):
            raise ObjectUnavailableError(object_id)
        return b"piece"

    assert len(brisk.pull_objects([str(n) for n in range(6)], slowly)) == 6
    assert time.monotonic() - began > brisk.STALLED


def test_flower_is_changed_by_the_processes_that_serve_and_not_by_imports():
    asks = (
        "import equipoise.cli.app, equipoise.hospitals.coordinator, equipoise.hospitals.site; from equipoise.hospitals"
    )
    asks += " import brisk, flower_api; print(flower_api.http_grid.pull_objects is brisk.pull_objects)"
    told = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
    with pytest.raises(ImportError, match=r"1\.41"):
        brisk.quicken(SimpleNamespace(__name__="flwr.other"))


def test_a_node_sleeps_no_longer_than_told():
    before = time.monotonic()
    _BriefSleeps(0.01).sleep(3)
    assert time.monotonic() - before < 1.0


@pytest.fixture
def messages(monkeypatch):
    """Messages can be made although this process serves no run of Flower."""
    monkeypatch.setattr(post, "Message", lambda *given, **named: given)


class FakeGrid:
    """A grid whose replies come when a test says so."""

    def __init__(self, *pulls):
        self.pulls, self.pushed = list(pulls), 0

    def push_messages(self, messages):
        self.pushed += 1
        return [f"message {self.pushed}"]

    def pull_messages(self, ids):
        return self.pulls.pop(0)(ids) if self.pulls else []


def reply_to(message_id):
    """A reply that cannot be used, which is enough here."""
    error = SimpleNamespace(reason=f"about {message_id}", code=1)
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=message_id), has_error=lambda: True, error=error
    )


def test_replies_are_told_apart_by_what_they_answer_and_strangers_are_ignored(messages):
    grid = FakeGrid(lambda ids: [reply_to("message 2"), reply_to("message 9")], lambda ids: [reply_to("message 1")])
    parcel = seal(prepare({}))
    replies = GridPost(grid, {})._deliver([(1, parcel), (2, parcel)], 30.0)
    assert [str(reply) for reply in replies] == ["about message 1", "about message 2"]


def test_a_site_that_dawdles_until_the_end_does_not_cost_the_others_their_replies(messages):
    def dawdle(ids):
        time.sleep(0.3)  # the time is up when this returns
        return []

    grid = FakeGrid(dawdle, lambda ids: [reply_to("message 2")])
    parcel = seal(prepare({}))
    first, second = GridPost(grid, {})._deliver([(1, parcel), (2, parcel)], 0.2)
    assert isinstance(first, SiteFailure) and "no answer" in str(first) and str(second) == "about message 2"


def test_a_message_that_failed_is_left_to_expire_since_flower_would_wait_for_ever(monkeypatch):
    pushed = []
    monkeypatch.setattr(flower_api, "HeartbeatSender", lambda _: SimpleNamespace(start=lambda: None, stop=lambda: None))
    monkeypatch.setattr(Link, "runtime", lambda self, token=None: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(flower_api, "pull_task_input", lambda client: ("message", None, None, None))
    monkeypatch.setattr(flower_api, "push_message", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    monkeypatch.setattr(flower_api, "push_task_output", lambda *given: pushed.append(given))
    with pytest.raises(RuntimeError):
        flower_api._serve_one(Link("127.0.0.1:1"), "token", lambda message: message)
    assert pushed == []


def test_code_that_comes_along_with_a_message_is_not_looked_at(monkeypatch):
    class Code:
        def __getattribute__(self, name):
            raise AssertionError(f"{name} of the code was read")

    done = []
    monkeypatch.setattr(flower_api, "HeartbeatSender", lambda _: SimpleNamespace(start=lambda: None, stop=lambda: None))
    monkeypatch.setattr(Link, "runtime", lambda self, token=None: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(flower_api, "pull_task_input", lambda client: ("message", None, Code(), Code()))
    monkeypatch.setattr(flower_api, "push_message", lambda client, reply, context: done.append(reply))
    monkeypatch.setattr(flower_api, "push_task_output", lambda *_: None)
    flower_api._serve_one(Link("127.0.0.1:1"), "token", lambda message: f"answer to {message}")
    assert done == ["answer to message"]


def test_a_pickle_on_the_wire_is_not_opened(tmp_path):
    class Opened:
        def __reduce__(self):
            return Path.touch, (tmp_path / "opened",)

    def carrying(content: np.ndarray):
        records, numbers = to_records(seal(prepare({}))), io.BytesIO()
        np.save(numbers, content, allow_pickle=True)
        array = Array("float32", (1,), "numpy.ndarray", numbers.getvalue())
        records.array_records["tensors"] = ArrayRecord({"float32": array})
        return records

    from_records(carrying(np.ones(1)))
    with pytest.raises(UnreadableParcel, match="damaged"):
        from_records(carrying(np.array([Opened()], dtype=object)))
    assert not (tmp_path / "opened").exists()


def test_without_flower_the_commands_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(UserError, match=r"needs Flower: install the extra flower: pip install 'flwr>?"):
        deploy_cli._prepare()


@pytest.mark.parametrize("words", [["server", "x.toml"], ["site", "x.toml"], ["pilot"]])
def test_windows_is_refused_in_words(words, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="by signals, which Windows lacks"):
        CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False)
