"""Logs of studies in one small file."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import tomli_w

from closeness import assert_alike
from equipoise.contract.config_files import override
from equipoise.studies import load_study
from equipoise.studies.archive import ARCHIVE, pack, unpack
from equipoise.studies.results import collect
from equipoise.studies.study_files import summary
from harness import TINY


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder of a small study that has run."""
    folder = tmp_path_factory.mktemp("packed")
    rows = [{"name": name, "method": name} for name in ("fedavg", "local")]
    content = {"name": "small", "metrics": ["macro_f1"], "settings": override({}, TINY), "row": rows}
    (folder / "small.toml").write_text(tomli_w.dumps(content))
    call = [sys.executable, "-m", "equipoise", "study", "small.toml"]
    subprocess.run(call, cwd=folder, check=True, capture_output=True)
    return folder


def told(folder):
    """What a study says of its runs."""
    found = summary(collect(load_study(str(folder / "small.toml")), folder / "studies" / "small"))
    return json.loads(json.dumps(found))


def test_a_study_says_the_same_of_its_packed_runs(study):
    folder, before = study / "studies" / "small", told(study)
    logs = {path: path.read_bytes() for path in folder.glob("runs/*/events.jsonl")}
    pack(folder)
    shutil.rmtree(folder / "runs")
    after = told(study)
    for row in before["rows"]:  # packed logs hold no predictions of single images, of which intervals are made
        for key in row.keys() - after["rows"][0].keys():
            assert key in ("intervals", "to_best"), key
            del row[key]
    assert_alike(after["rows"], before["rows"])
    assert after["rule"] == before["rule"] and len(before["rows"]) == 2
    listed = dict(line.split("  ")[::-1] for line in (folder / "runs.sha256").read_text().splitlines())
    assert listed == {f"{path.parent.name}/{path.name}": hashlib.sha256(log).hexdigest() for path, log in logs.items()}
    for path, log in logs.items():
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        for line, event in zip(log.splitlines(), kept, strict=True):
            was = json.loads(line)
            if was["event"] == "evaluation":
                assert event["metrics"] == pytest.approx(was["metrics"], abs=1e-5)
                assert event | {"metrics": 0} == was | {"metrics": 0}
            elif was["event"] != "round":
                assert event == was


def test_runs_that_are_there_are_not_replaced(study):
    folder = study / "studies" / "small"
    pack(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/events.jsonl")}
    assert unpack(folder) == folder / "runs"
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/events.jsonl")} == before
    assert (folder / ARCHIVE).stat().st_size < sum(path.stat().st_size for path in before)
