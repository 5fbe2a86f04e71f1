"""`equipoise new` writes plug-ins that run at once, and `equipoise check` finds what one does not keep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.checks.battery import CHECKS, findings
from equipoise.checks.subjects import subjects_of
from equipoise.cli.templates import TEXTS, text_of

FLOWER, WORKERS = "a round on Flower gives the bits of a local one", "two workers give the same bits"
#: checks that need no other process
QUICK = [title for title in CHECKS if title not in (FLOWER, WORKERS)]
METHOD = """import torch

import equipoise as eq


class Client(eq.FedAvgClient):
    def loss(self, batch, out):
        LINE
        return super().loss(batch, out)


METHOD = eq.Method(eq.FedAvgServer, Client, "none", 2026, "nothing")
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))


def equipoise(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "equipoise", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("kind", TEXTS)
def test_what_new_writes_keeps_what_our_own_keep(kind, tmp_path):
    Path("mine.py").write_text(text_of(kind, "mine"))
    ((found, subject),) = subjects_of("mine.py")
    assert found == kind
    few = ["a resumed run has the same bits", "hooks read nothing on the host"]
    assert [finding for finding in findings(subject, tmp_path, few) if not finding.kept] == []


@pytest.mark.parametrize(
    ("line", "title", "told"),
    [
        ("float(batch.image.sum())", "hooks read nothing on the host", "_local_scalar_dense in loss"),
        (
            "import random as r; return super().loss(batch, out) * r.random()",
            "a resumed run has the same bits",
            "differ",
        ),
        ("return super().loss(batch, out) * float('nan')", "a run ends with finite weights", ""),
        ("raise ValueError('no way')", "a run ends with finite weights", "ValueError: no way"),
    ],
)
def test_a_method_that_does_not_keep_it_is_found_out(tmp_path, line, title, told):
    Path("bad.py").write_text(METHOD.replace("LINE", line))
    (finding,) = findings(dict(subjects_of("bad.py"))["method"], tmp_path, [title])
    assert not finding.kept and told in finding.told


LEAKS = """import equipoise as eq


class Site(eq.SiteSide):
    def loss(self, batch, out, loss):
        return loss + out.logits.mean(0).square().sum()


class Mixed(eq.Component):
    name = "mixed"
    rank = 45
    Site = Site
    image_by_image = True


COMPONENT = Mixed


class Client(eq.FedAvgClient):
    discloses = {"train": {**eq.FedAvgClient.discloses["train"], "seen": "images of each class"}}

    def train(self, message):
        yield eq.Train()
        return self.update() | {"seen": self.class_counts.clone()}


METHOD = eq.Method(eq.FedAvgServer, Client, "none", 2026, "nothing")
"""


def test_a_plug_in_that_breaks_privacy_is_found_out(tmp_path):
    Path("leaks.py").write_text(LEAKS)
    found = dict(subjects_of("leaks.py"))
    (least,) = findings(
        found["method"], tmp_path / "least", ["nothing of few images leaves a site under privacy.least"]
    )
    assert not least.kept and least.told.startswith("train.seen: a row of a class of few images")
    (sums,) = findings(found["method"], tmp_path / "sums", ["secure sums give the same model"])
    assert sums.kept and "left out: privacy.secure_sums hides what each site sends" in sums.told
    pytest.importorskip("opacus")
    (private,) = findings(found["component"], tmp_path / "private", ["differential privacy holds with it"])
    assert not private.kept and "leave image_by_image out" in private.told


def test_a_loss_of_ones_own_trains_on_masks(tmp_path):
    Path("mine.py").write_text(text_of("loss", "mine"))
    (finding,) = findings(dict(subjects_of("mine.py"))["loss"], tmp_path, ["images with masks are segmented"])
    assert finding.kept and not finding.told


def test_new_and_check_by_the_command_line():
    done = equipoise("new", "method", "fed-mine")
    assert done.returncode == 0 and Path("fed_mine.py").exists() and Path("test_fed_mine.py").exists()
    assert "run it: equipoise run --method fed_mine.py" in done.stdout
    again = equipoise("new", "method", "fed-mine")
    assert again.returncode == 2 and "exists" in again.stderr
    Path("bad.py").write_text(METHOD.replace("LINE", "float(batch.image.sum())"))
    checked = equipoise("check", "bad.py", "--no-flower")
    assert (
        checked.returncode == 1
        and checked.stdout.count("ok ") == len(CHECKS) - 2
        and "broken hooks read" in checked.stdout
    )
    Path("empty.py").write_text("")
    refused = equipoise("check", "empty.py")
    assert refused.returncode == 2 and "empty.py holds no plug-in" in refused.stderr
