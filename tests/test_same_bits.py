"""`benchmarks/same_bits.py` finds two equal commits equal, and one bit that differs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from harness import run_tiny

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from bits.compare import differences  # noqa: E402
from same_bits import main  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return run_tiny(tmp_path_factory.mktemp("run") / "run", "fedrep")


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def flip_a_bit(path: Path) -> None:
    """Change the last bit of the last number in a file of tensors."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_head_has_the_bits_of_the_working_tree_until_one_is_changed(tmp_path, capsys):
    if not (ROOT / ".git").exists():
        pytest.skip("this folder is no git repository, so there is no commit to compare with")
    command = ["HEAD", "--here", "--only", "^(fedavg|fedrep)$", "--cache", str(tmp_path), "--processes", "1"]
    assert main([*command, "--ways", "one,continued"]) == 0
    assert "4 of 4 equal" in capsys.readouterr().out
    (kept,) = tmp_path.glob("*/*/fedrep-*/models/personal/site 2.safetensors")
    flip_a_bit(kept)
    assert main([*command, "--ways", "one"]) == 1
    said = capsys.readouterr().out
    assert "fedrep [one]: models/personal/site 2.safetensors: " in said and "1 of 2 equal" in said


def test_two_copies_of_a_run_do_not_differ(run, copy):
    assert list(differences(run, copy)) == []


@pytest.mark.parametrize("place", ["checkpoints/round-00002/server", "sites/site 1/00002-0-0", "models/global"])
def test_one_bit_of_a_tensor_is_named_with_its_file(run, copy, place):
    path = copy / f"{place}.safetensors"
    flip_a_bit(path)
    (line,) = differences(run, copy)
    assert line.startswith(f"{place}.safetensors: ") and "1 of " in line


def test_a_score_that_differs_is_named(run, copy):
    log = copy / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    last = next(event for event in reversed(events) if event["event"] == "final")
    last["metrics"]["accuracy"] += 1e-12
    log.write_text("\n".join(map(json.dumps, events)))
    (line,) = differences(run, copy)
    assert "accuracy" in line


def test_a_file_that_is_gone_is_named(run, copy):
    (copy / "models" / "global.safetensors").unlink()
    assert list(differences(run, copy)) == ["models/global.safetensors: only the old run has it"]
