"""Nothing is lost without a word: damage is met on reading, and mishaps end in words with an exit status."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from equipoise.core.errors import UserError
from equipoise.core.storage import checked_text
from equipoise.engine import checkpoint, payload_files, states
from equipoise.engine.checkpoint import Manifest, _read
from equipoise.engine.payload_files import DAMAGE, arrays_in, read_payload
from equipoise.report import read_run
from harness import TINY, all_state, assert_same_bits, events, last_checkpoint, run_tiny

SHORT = ("train.rounds=2", "evaluation.trained=false")


def test_no_flipped_bit_of_a_manifest_changes_what_it_says():
    manifest = Manifest(3, "digest", "data", 1234, {"site 1": "00003-0-0"}, {"round": 2}, 1.5, "0123abcd")
    text = checked_text(asdict(manifest)).encode()
    assert _read(text) == manifest
    for place in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[place // 8] ^= 1 << place % 8
        try:
            assert _read(bytes(flipped)) == manifest, "only white space may differ"
        except (*DAMAGE, RecursionError):
            pass


def test_manifests_of_before_are_read():
    old = {"round": 1, "digest": "d", "data": "f", "events": 5, "sites": {}, "selection": {}, "seconds": 0.5}
    assert _read(json.dumps(old).encode()) == Manifest(1, "d", "f", 5, seconds=0.5)


def test_payloads_of_before_are_read_and_their_damage_is_met(tmp_path):
    weights = {"model/w": torch.arange(4.0)}
    plain = json.dumps({"model": {"entries": 1}, "rounds": 3})
    for checksum in (payload_files._checksum(weights, plain), "00000000"):
        save_file(weights, tmp_path / checksum, metadata={"plain": plain, "checksum": checksum})
    sound, damaged = payload_files._checksum(weights, plain), "00000000"
    found = read_payload(tmp_path / sound)
    assert found["rounds"] == 3 and torch.equal(found["model"]["w"], weights["model/w"])
    with pytest.raises(ValueError, match="does not hold what was written"):
        read_payload(tmp_path / damaged)


def test_a_damaged_log_is_refused_on_resume_and_named_by_a_report(tmp_path):
    folder = run_tiny(tmp_path / "run", "fedavg", *SHORT)
    log = folder / "events.jsonl"
    assert not read_run(folder).warnings
    log.write_text(log.read_text().replace('"lr": 0.02', '"lr": 0.03', 1))
    assert any("does not hold what the run wrote" in text for text in read_run(folder).warnings)
    with pytest.raises(UserError, match="damaged: it does not hold what the run wrote"):
        run_tiny(folder, "fedavg", *SHORT, "train.rounds=3", resume=True)


def digests(folder: Path) -> dict[str, str]:
    """The content of every file of a run that holds no times."""
    timed = {"events.jsonl", "manifest.json"}
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in timed)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def without_times(folder: Path) -> list[dict]:
    found = events(folder)
    for event in found:
        for key in ("time", "seconds", "checksum"):
            event.pop(key, None)
        for facts in event["sites"].values() if event["event"] == "round" else ():
            facts.pop("seconds")
    return found


def test_equal_runs_give_equal_files_byte_for_byte_times_aside(tmp_path):
    one, two = (run_tiny(tmp_path / name / "run", "scaffold", *SHORT) for name in ("one", "two"))
    assert digests(one) == digests(two) and without_times(one) == without_times(two)


def test_states_lie_on_the_disk_before_a_manifest_names_them(tmp_path, monkeypatch):
    said: list[str] = []

    def settled(path: Path) -> None:
        said.append(path.name.partition(".safetensors")[0])
        real(path)

    real = states.settle
    for module in (payload_files, checkpoint, states):
        if hasattr(module, "settle"):
            monkeypatch.setattr(module, "settle", settled)
    monkeypatch.setattr("equipoise.core.storage.settle", settled)
    folder = run_tiny(tmp_path / "run", "scaffold", "train.rounds=1")
    manifest = json.loads((last_checkpoint(folder) / "manifest.json").read_text())
    first = next(place for place, name in enumerate(said) if name.startswith("manifest.json") and place > 3)
    for version in (*manifest["sites"].values(), "server", "scores"):
        assert version in [name.partition(".")[0] for name in said[: first + 20]]
    last = max(place for place, name in enumerate(said) if name.startswith("manifest.json"))
    assert set(manifest["sites"].values()) <= {name.partition(".")[0] for name in said[:last]}


def test_a_run_falls_back_from_a_damaged_state_and_ends_where_none_is_sound(tmp_path):
    straight = all_state(run_tiny(tmp_path / "straight", "scaffold", *SHORT))
    folder = run_tiny(tmp_path / "run", "scaffold", *SHORT)
    version = json.loads((last_checkpoint(folder) / "manifest.json").read_text())["sites"]["site 2"]
    (path,) = (folder / "sites").glob(f"site 2/{version}.safetensors")
    path.write_bytes(b"")
    run_tiny(folder, "scaffold", *SHORT, resume=True)
    assert_same_bits(straight, all_state(folder))
    assert any("damaged checkpoints were deleted" in event["text"] for event in events(folder, "warning"))
    for state in (folder / "sites").glob("site 2/*.safetensors"):
        state.write_bytes(b"")
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged"):
        run_tiny(folder, "scaffold", *SHORT, resume=True)


def equipoise(*words: str, **more) -> subprocess.Popen:
    command = [sys.executable, "-m", "equipoise", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def settings(*own: str) -> list[str]:
    return [word for setting in (*TINY, *own) for word in ("--set", setting)]


REPLACED = (
    "events.jsonl",
    "config.toml",
    "checkpoints/round-00002/manifest.json",
    "checkpoints/round-00002/server.safetensors",
)


@pytest.mark.parametrize("name", REPLACED)
def test_a_folder_in_place_of_a_file_is_told_in_words(tmp_path, name, capsys, monkeypatch):
    from equipoise.cli.app import main

    folder = run_tiny(tmp_path / "run", "fedavg", *SHORT)
    for path in folder.glob(f"{name.replace('00002', '0000?')}"):
        path.unlink()
        path.mkdir()
    words = ["run", "--method", "fedavg", "--out", str(folder), "--resume", *settings(*SHORT)]
    monkeypatch.setattr("sys.argv", ["equipoise", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in told and "error:" in told, told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_in_words(tmp_path, capsys, monkeypatch):
    from equipoise.cli.app import main
    from equipoise.engine.events import EventLog

    write = EventLog.write

    def full(self, event, **fields):
        if event == "round":
            with Path("/dev/full").open("w") as file:
                file.write("x" * 10_000)
        write(self, event, **fields)

    monkeypatch.setattr(EventLog, "write", full)
    monkeypatch.setattr("sys.argv", ["equipoise", "run", "--out", str(tmp_path / "run"), *settings(*SHORT)])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr().err
    assert stop.value.code == 2 and "No space left" in told and "--resume" in told


@pytest.mark.slow
def test_sigterm_is_told_in_words_with_status_143_and_the_run_goes_on(tmp_path):
    folder = tmp_path / "run"
    words = ["run", "--out", str(folder), *settings("train.rounds=40", "checkpoint.keep=1")]
    with equipoise(*words, env={**os.environ, "OMP_NUM_THREADS": "1"}) as child:
        until = time.monotonic() + 120
        while time.monotonic() < until and not list((folder / "checkpoints").glob("round-00002")):
            time.sleep(0.05)
        time.sleep(random.Random(1).random())
        child.send_signal(signal.SIGTERM)
        _, told = child.communicate(timeout=60)
    assert child.returncode == 143 and "stopped by SIGTERM" in told and "--resume" in told
    rounds = len(events(folder, "round"))
    run_tiny(folder, "fedavg", "train.rounds=40", "checkpoint.keep=1", resume=True)
    assert rounds < len(events(folder, "round")) == 40


@pytest.mark.parametrize("settings", [(), ("train.rounds=3",)])
def test_a_damaged_config_of_a_run_is_told_in_words(tmp_path, settings):
    folder = run_tiny(tmp_path / "run", "fedavg")
    path = folder / "config.toml"
    path.write_text(path.read_text().replace("[train]", "[train", 1))
    with pytest.raises(UserError, match=r"config\.toml, which the run wrote, is not valid TOML"):
        run_tiny(folder, "fedavg", *settings, resume=True)


def test_a_file_that_may_not_grow_is_told_in_words(tmp_path, capsys, monkeypatch):
    """By a limit of the shell or a quota: the kernel says that the file is too large."""
    resource = pytest.importorskip("resource")
    from equipoise.cli.app import main

    monkeypatch.setattr("sys.argv", ["equipoise", "run", "--out", str(tmp_path / "run"), *settings(*SHORT)])
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, usual[1]))
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    told = capsys.readouterr().err
    assert stop.value.code == 2 and "File too large" in told and "Traceback" not in told


def test_packed_arrays_with_any_bit_turned_are_refused_in_words_or_read_whole(tmp_path):
    whole, path = {"shares": np.arange(50) / 7, "names": np.array(["a", "bc"])}, tmp_path / "arrays.npz"
    np.savez_compressed(path, **whole)
    sound = path.read_bytes()
    refused = 0
    for place in range(len(sound)):
        for bit in (1, 128):
            path.write_bytes(sound[:place] + bytes([sound[place] ^ bit]) + sound[place + 1 :])
            try:
                with arrays_in(path, "delete it") as file:
                    found = dict(file)
                assert all(np.array_equal(found[name], value) for name, value in whole.items() if name in found)
            except UserError as problem:
                assert "is damaged" in str(problem) and "delete it" in str(problem)
                refused += 1
    assert refused > len(sound)
