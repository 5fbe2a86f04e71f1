"""The same methods between real processes on loopback, with TLS: equal weights, kills, strangers and liars."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch

pytest.importorskip("flwr")

from consortium import Consortium, finish, lay_out_consortium, running, running_sites, start_server, wait_for
from equipoise.engine.states import read_state
from equipoise.hospitals.deployment_files import LEAST
from equipoise.hospitals.pilot import start_site
from equipoise.hospitals.processes import Child
from equipoise.hospitals.security import new_key_pair
from harness import (
    TINY,
    assert_same_bits,
    events,
    run_tiny,
    server_state,
    site_states,
    tiny_config,
    with_lost_site,
)

METHODS = ("fedavg", "fediic", "prr", "fedbm", "fedbn+margins+npr", "fedavg+cpa+deputy+fourier+local-norm")
#: what hospitals hold back unless told otherwise
LIMIT = f"privacy.least={LEAST}"
SETTINGS = ("train.rounds=3", "evaluation.every=3")
BRIEF = ("train.rounds=2", "evaluation.every=2")
LONG = 240.0

slow = pytest.mark.skipif("EQUIPOISE_SLOW_TESTS" not in os.environ, reason="takes a minute: set EQUIPOISE_SLOW_TESTS=1")


@pytest.fixture(scope="module")
def consortium(tmp_path_factory):
    laid_out = lay_out_consortium(tmp_path_factory.mktemp("consortium"), *METHODS, timeout=15.0)
    with running(laid_out):
        yield laid_out


def kept_at_sites(consortium: Consortium, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that sites keep on their own disks after a run's last round, named as `site_states` does."""
    run = json.loads((folder / "consortium.json").read_text())["run"]
    last = sorted((folder / "checkpoints").glob("round-?????"))[-1]
    states = {}
    for site, version in json.loads((last / "manifest.json").read_text())["sites"].items():
        path = consortium.files[site].parent / "state" / "runs" / run / "states" / f"{version}.safetensors"
        states.update({f"{site}/kept/{name}": tensor for name, tensor in read_state(path).items()})
    return states


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_those_of_the_local_engine(consortium, tmp_path, method):
    local = run_tiny(tmp_path / "local", method, *SETTINGS, LIMIT)
    apart = consortium.run(tiny_config(method, *SETTINGS), tmp_path / "apart")
    assert_same_bits(server_state(local), server_state(apart))
    assert_same_bits(site_states(local), kept_at_sites(consortium, apart))
    assert not list((apart / "models").glob("personal/*"))  # personal models stay with their sites
    states = [file.parent / "state" for file in consortium.files.values()]
    assert not [path for state in states for path in (state, *state.rglob("*")) if exposed(path)]


def test_an_unregistered_key_is_refused_in_words(consortium, tmp_path):
    known = consortium.files["site 1"]
    new_key_pair(tmp_path / "node.key", tmp_path / "node.pub")
    for name in ("ca.crt", "coordinator.pub"):
        (tmp_path / name).write_bytes((known.parent / name).read_bytes())
    stranger = tmp_path / "site.toml"
    stranger.write_text(known.read_text())
    said = tmp_path / "site.log"
    with start_site(stranger):
        wait_for(lambda: said.exists() and "does not know this site's key" in said.read_text(), LONG, "the refusal")


@slow
def test_the_check_refuses_a_name_that_another_key_has(consortium, tmp_path):
    """Site 2 uses the key that the server has for site 1; a check by site 1 itself passes while it takes part."""
    own = consortium.files["site 1"]
    for name, status, told in (
        ("site 2", 2, "knows this site's key as 'site 1'"),
        ("site 1", 0, "lets this site in"),
    ):
        folder = tmp_path / name
        shutil.copytree(own.parent, folder)
        file = folder / "site.toml"
        file.write_text(own.read_text().replace('name = "site 1"', f'name = "{name}"'))
        command = [sys.executable, "-m", "equipoise", "site", str(file), "--check"]
        with Child(command, folder / "check.log") as child:
            assert finish(child, LONG) == status, child.tail()
        assert told in child.said()


@slow
def test_a_site_killed_in_mid_round_is_dropped_and_comes_back(consortium, tmp_path):
    """Site 2 is killed while it works on round 2; round 3 waits until it is connected again."""
    stuck, file = tmp_path / "stuck", consortium.files["site 2"]
    consortium.sites["site 2"].stop()
    command = [sys.executable, str(Path(__file__).with_name("stuck_site.py")), str(file), str(stuck)]
    consortium.sites["site 2"] = Child(command, tmp_path / "log")

    def kill() -> None:
        wait_for(stuck.exists, LONG, "the training of round 2")
        os.kill(consortium.sites["site 2"].process.pid, signal.SIGKILL)

    class Restarts:
        def event(self, event, **fields):
            if event == "round" and fields["round"] == 2:
                wait_for(lambda: not consortium.online("site 2"), LONG, "the site's end")
                consortium.start("site 2")
                wait_for(lambda: consortium.online("site 2"), LONG, "the site's return")

    killer = Thread(target=kill)
    killer.start()
    config = tiny_config("fedavg", "train.rounds=3", "train.min_sites=2", "evaluation.every=10")
    folder = consortium.run(config, tmp_path / "run", [Restarts()])
    killer.join()
    assert [list(event["missing"]) for event in events(folder, "round")] == [[], ["site 2"], []]


@slow
def test_garbage_and_nan_are_refused_and_the_site_may_go_on(consortium, tmp_path):
    consortium.sites["site 3"].stop()
    hostile = Path(__file__).with_name("hostile_site.py")
    with Child([sys.executable, str(hostile), str(consortium.files["site 3"])], tmp_path / "log"):
        folder = consortium.run(tiny_config("fedavg", "train.rounds=3", "evaluation.every=3"), tmp_path / "run")
    missing = [event["missing"] for event in events(folder, "round")]
    assert [list(sites) for sites in missing] == [["site 3"], ["site 3"], []]
    assert "cannot be read" in missing[0]["site 3"] and "NaN" in missing[1]["site 3"]


def stop(consortium: Consortium, folder: Path, journaled: str, number: signal.Signals) -> Child:
    """Start a server, and send it a signal as soon as all sites' replies to one message are journaled."""

    def all_there() -> bool:
        return len(list((folder / "journal").glob(f"{journaled}-*.json"))) == len(consortium.files)

    with start_server(consortium, folder, "fediic", *BRIEF) as server:
        wait_for(all_there, LONG, f"the exchange {journaled}")
        os.kill(server.process.pid, number)
        finish(server, LONG)
    return server


@slow
@pytest.mark.parametrize(
    ("journaled", "number", "status"),
    [
        pytest.param("00001-0-0", signal.SIGKILL, -9, id="killed between the two exchanges of a round"),
        pytest.param("00002-0-1", signal.SIGKILL, -9, id="killed after train"),
        pytest.param("00001-0-1", signal.SIGTERM, 143, id="stopped after train"),
    ],
)
def test_a_stopped_server_resumes_with_the_same_bits(tmp_path, journaled, number, status):
    laid_out = lay_out_consortium(tmp_path / "consortium", "fediic")
    folder, state = tmp_path / "run", laid_out.settings.state
    with running_sites(laid_out):  # the server brings its own SuperLink
        assert stop(laid_out, folder, journaled, number).process.returncode == status
        assert not (folder / "models").exists()
        wait_for(lambda: not list(state.glob("superlink.db*")), LONG, "the end of the SuperLink and its database")
        with start_server(laid_out, folder, "fediic", *BRIEF, resume=True) as server:
            assert finish(server, LONG) == 0, server.tail(30)
    local = run_tiny(tmp_path / "local", "fediic", *BRIEF, LIMIT)
    assert_same_bits(server_state(local), server_state(folder))
    assert (folder / "report.html").exists()
    states = [file.parent / "state" for file in laid_out.files.values()]
    assert not [path for top in (folder, state, *states) for path in (top, *top.rglob("*")) if exposed(path)]
    assert not any(map(exposed, (tmp_path / "consortium").rglob("*.key")))


def exposed(path: Path) -> bool:
    """Whether other accounts can read a file, or look into a folder."""
    return bool(path.stat().st_mode & 0o077)


@pytest.mark.parametrize(
    ("number", "status", "told"),
    [(signal.SIGINT, 130, "interrupted by Ctrl-C"), (signal.SIGTERM, 143, "stopped by SIGTERM")],
)
def test_a_stopped_server_names_who_stopped_it(tmp_path, request, number, status, told):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    request.addfinalizer(partial(signal.signal, signal.SIGINT, before))
    laid_out = lay_out_consortium(tmp_path / "consortium", "fedavg")
    with start_server(laid_out, tmp_path / "run", "fedavg", *BRIEF) as server:
        wait_for(lambda: "connected: nobody" in server.said(), LONG, "the wait for sites")
        os.kill(server.process.pid, number)
        assert finish(server, LONG) == status, server.tail(30)
    assert f"{told}" in server.said() and "--resume goes on after the last complete round" in server.said()


@slow
def test_a_server_killed_while_it_sends_leaves_no_site_waiting_for_ever(tmp_path):
    laid_out = lay_out_consortium(tmp_path / "consortium", "fediic")
    folder, dying = tmp_path / "run", str(Path(__file__).with_name("dying_server.py"))
    describe_evaluate_and_one_survey = 3 + 3 + 2
    with running_sites(laid_out):
        program = (dying, str(describe_evaluate_and_one_survey))
        with start_server(laid_out, folder, "fediic", *BRIEF, program=program) as server:
            assert finish(server, LONG) == -signal.SIGKILL
        with start_server(laid_out, folder, "fediic", *BRIEF, resume=True) as server:
            assert finish(server, LONG) == 0, server.tail(30)
    local = run_tiny(tmp_path / "local", "fediic", *BRIEF, LIMIT)
    assert_same_bits(server_state(local), server_state(folder))


@slow
def test_a_pilot_is_one_command_and_leaves_nothing_running(tmp_path):
    command = [sys.executable, "-m", "equipoise", "pilot", "--sites", "3", "--rounds", "3", "--method", "fedavg"]
    command += ["--out", str(tmp_path / "pilot")]
    by_option = ("train.rounds=", "data.phantom.sites=")
    for setting in (*(setting for setting in TINY if not setting.startswith(by_option)), "evaluation.every=3"):
        command += ["--set", setting]
    with Child(command, tmp_path / "log") as pilot:
        assert finish(pilot, LONG) == 0, pilot.tail(30)
    local = run_tiny(tmp_path / "local", "fedavg", *SETTINGS, LIMIT)
    assert_same_bits(server_state(local), server_state(tmp_path / "pilot"))
    assert (tmp_path / "pilot" / "report.html").exists()
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(tmp_path).encode() in command and b"equipoise.hospitals." in command for command in commands)


@pytest.mark.slow
@slow
def test_a_pilot_with_secure_sums_has_the_bits_of_the_simulation(tmp_path):
    secure = ("privacy.secure_sums=true",)
    laid_out = lay_out_consortium(tmp_path / "consortium", "fedavg", settings=secure, timeout=60.0)
    with running(laid_out):
        apart = laid_out.run(tiny_config("fedavg", *secure), tmp_path / "apart")
    local = run_tiny(tmp_path / "local", "fedavg", *secure, LIMIT)
    assert_same_bits(server_state(local), server_state(apart))
    assert events(local, "evaluation") == events(apart, "evaluation")


@pytest.mark.slow
@slow
def test_a_site_killed_within_a_secure_sum_is_taken_out_of_it(tmp_path):
    """It has given shares of its keys, and dies while it trains; the other three open the sum of theirs."""
    settings = ("privacy.secure_sums=true", "data.phantom.sites=4", "data.phantom.images=200", "evaluation.every=2")
    four, stuck = lay_out_consortium(tmp_path / "four", "fedavg", settings=settings, timeout=30.0), tmp_path / "stuck"
    with running(four):
        four.sites["site 2"].stop()
        command = [
            sys.executable,
            str(Path(__file__).with_name("stuck_site.py")),
            str(four.files["site 2"]),
            str(stuck),
        ]
        four.sites["site 2"] = Child(command, tmp_path / "log")

        def kill() -> None:
            wait_for(stuck.exists, LONG, "the training of round 2")
            os.kill(four.sites["site 2"].process.pid, signal.SIGKILL)

        killer = Thread(target=kill)
        killer.start()
        apart = four.run(tiny_config("fedavg", *settings), tmp_path / "apart")
        killer.join()
    local = run_tiny(tmp_path / "local", with_lost_site("fedavg", "site 2", 2), *settings, LIMIT)
    assert [list(event["missing"]) for event in events(apart, "round")] == [[], ["site 2"]]
    assert_same_bits(server_state(local), server_state(apart))
