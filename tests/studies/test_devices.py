"""Studies on several devices and clusters: equal bits, work by cost, lost processes."""

import gc
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from equipoise.cli.app import main
from equipoise.core.device_names import devices_of
from equipoise.core.errors import UserError
from equipoise.studies.devices import _sendable, dearest_first, expected_cost, run_on_devices
from equipoise.studies.grid import cell_config, grid
from equipoise.studies.study_file import load_study
from harness import TINY, all_state, assert_same_bits

STUDY = """
name = "small"
title = "small"
seeds = [1, 2]
[settings]
method = "fedavg"
{settings}
[[row]]
name = "FedAvg"
method = "fedavg"
[[row]]
name = "PRR"
method = "prr"
settings = {{ train = {{ epochs = 3 }} }}
"""


@pytest.fixture
def study_file(tmp_path):
    lines = "\n".join(setting for setting in TINY if not setting.startswith("augment"))
    path = tmp_path / "small.toml"
    path.write_text(STUDY.format(settings=lines).replace('method = "fedavg"\ntrain', "train"))
    return path


def run(monkeypatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["equipoise", "study", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("where", [("--devices", "cpu:2"), ("--on", "local")], ids=["devices", "jobs"])
def test_several_processes_train_the_bits_of_one(tmp_path, monkeypatch, study_file, where):
    assert run(monkeypatch, study_file, "--out", tmp_path / "one", "--keep-checkpoints") == 0
    assert run(monkeypatch, study_file, "--out", tmp_path / "several", "--keep-checkpoints", *where) == 0
    names = sorted(path.name for path in (tmp_path / "one" / "small" / "runs").iterdir() if path.is_dir())
    assert names == ["FedAvg-seed1", "FedAvg-seed2", "PRR-seed1", "PRR-seed2"]
    for name in names:
        runs = [tmp_path / kind / "small" / "runs" / name for kind in ("one", "several")]
        assert_same_bits(*map(all_state, runs))


def test_the_dearest_runs_come_first(tmp_path, study_file):
    study = load_study(str(study_file))
    planned = [(cell, cell_config(study, cell)) for cell in grid(study, tmp_path)]
    ordered = [cell.row.name for cell, _ in dearest_first(planned)]
    assert ordered == ["PRR", "PRR", "FedAvg", "FedAvg"]
    costs = {cell.row.name: expected_cost(config) for cell, config in planned}
    assert costs["PRR"] > 3 * costs["FedAvg"]


@pytest.mark.parametrize("text", ["gpu", "cpu:0", "cuda:a", "cpu:2,", ""])
def test_devices_that_are_none_are_refused(text):
    with pytest.raises(UserError, match="is no list of devices"):
        devices_of(text)


def test_ways_that_do_not_go_together_are_refused(tmp_path, monkeypatch, study_file):
    assert run(monkeypatch, study_file, "--out", tmp_path, "--devices", "cpu:2", "--together", "2") == 2
    assert run(monkeypatch, study_file, "--out", tmp_path, "--on", "local", "--devices", "cpu:2") == 2
    assert run(monkeypatch, study_file, "--out", tmp_path, "--devices", "cpu:2", "--workers", "2") == 2
    assert run(monkeypatch, study_file, "--out", tmp_path, "--on", "somewhere") == 2
    (tmp_path / "cluster.toml").write_text("jobs = 'many'")
    assert run(monkeypatch, study_file, "--out", tmp_path, "--on", "local", "--cluster", tmp_path / "cluster.toml") == 2


class Worded(Exception):
    """An error that cannot be made anew of its text alone, as some libraries have."""

    def __init__(self, text: str, code: int):
        super().__init__(f"{text}, code {code}")


def test_an_error_that_no_other_process_can_read_comes_as_text():
    sent = pickle.loads(pickle.dumps(_sendable(Worded("no room", 7))))
    assert str(sent) == "Worded: no room, code 7"
    ours = UserError("too large")
    assert _sendable(ours) is ours


def die_in_a_message(run):
    """Begin a message of a hundred bytes, write four of them, and be killed; other rows train."""
    if run.config.method == "prr":
        (line,) = (each for each in gc.get_objects() if isinstance(each, Connection) and each.writable)
        os.write(line.fileno(), struct.pack("!i", 100) + b"half")
        os.kill(os.getpid(), signal.SIGKILL)


class Silent:
    def started(self, cell, config):
        return self

    def ended(self, cell, how):
        pass

    def event(self, event, **fields):
        pass


def test_a_process_that_dies_in_the_middle_of_a_message_costs_its_run_alone(tmp_path, study_file):
    study = load_study(str(study_file))
    cells = [cell for cell in grid(study, tmp_path) if cell.seed == 1]
    planned = [(cell, cell_config(study, cell)) for cell in cells]
    outcome = run_on_devices(planned, Silent(), ["cpu", "cpu"], check=die_in_a_message)
    assert outcome.finished == ["FedAvg-seed1"] and [*outcome.failed] == ["PRR-seed1"]
    assert "ended from outside" in str(outcome.failed["PRR-seed1"])


@pytest.mark.slow
def test_a_killed_process_costs_its_run_alone_and_the_same_command_goes_on(tmp_path, monkeypatch, study_file):
    command = [sys.executable, "-m", "equipoise", "study", str(study_file), "--out", str(tmp_path)]
    parent = subprocess.Popen([*command, "--devices", "cpu:2", "--set", "train.rounds=12"], stderr=subprocess.PIPE)
    while not any((tmp_path / "small" / "runs").glob("*/checkpoints/round-?????")):
        time.sleep(0.2)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, told = parent.communicate(timeout=300)
    assert parent.returncode == 2 and b"the same command goes on" in told
    assert run(monkeypatch, study_file, "--out", tmp_path, "--set", "train.rounds=12", "--devices", "cpu:2") == 0
