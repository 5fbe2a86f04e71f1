"""Methods that users bring: as objects, files and modules, from Python and the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_from_python import PHANTOM, SMALL

import equipoise as eq
from equipoise.core import outside
from equipoise.methods import get_method
from harness import all_state, assert_same_bits

SOURCE = '''"""FedSoft: FedAvg with soft labels.

More about it.
"""

import equipoise as eq
from pydantic import Field
from torch.nn import functional as F


class Options(eq.Options):
    """One number."""

    smoothing: float = Field(0.1, ge=0, lt=1, description="share of a label that all classes get")


class SoftClient(eq.FedAvgClient):
    """Trains with soft labels."""

    def supervised(self, logits, labels):
        return F.cross_entropy(logits, labels, label_smoothing=self.options.smoothing)


METHOD = eq.Method(eq.FedAvgServer, SoftClient, "own", 2026, "loss", Options)
'''


class HardClient(eq.FedAvgClient):
    """Trains on the loss times itself."""

    def loss(self, batch, out) -> torch.Tensor:
        loss = super().loss(batch, out)
        return loss * loss


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_soft.py").write_text(SOURCE)
    monkeypatch.delitem(sys.modules, "my_soft", raising=False)


def test_a_file_a_module_and_an_object_are_one_method():
    fed = eq.load_federation("phantom", phantom=PHANTOM)
    settings = {**SMALL, "my-soft.smoothing": 0.3}
    by_file = eq.train(fed, "my_soft.py", rounds=2, workers=2, out="file", settings=settings)
    assert get_method("my_soft.py").summary == "FedSoft: FedAvg with soft labels."
    import my_soft

    by_object = eq.train(fed, my_soft.METHOD, rounds=1, out="object", settings=settings)
    assert by_object.config.method == "my_soft:METHOD"
    assert_same_bits(all_state(by_file.path), all_state(by_object.resume(rounds=2).path))
    plain = eq.train(fed, "fedavg", rounds=2, out="plain", settings=SMALL)
    assert not all(
        torch.equal(a, b) for a, b in zip(by_file.model().state_dict().values(), plain.model().state_dict().values())
    )


def test_the_command_line_takes_a_file():
    sets = [f"--set=data.phantom.{key}={value}" for key, value in PHANTOM.items()]
    command = [sys.executable, "-m", "equipoise", "run", "--method", "my_soft.py", "--set=my-soft.smoothing=0.2", *sets]
    subprocess.run([*command, "--rounds=1", "--set=train.batch_size=8"], check=True, capture_output=True)
    result = eq.load_result("runs/my-soft-phantom-seed1")
    assert result.config.methods["my-soft"] == {"smoothing": 0.2} and result.model() is not None


def test_an_object_of_a_program_or_notebook(monkeypatch):
    hard = eq.Method(eq.FedAvgServer, HardClient, "own", 2026, "loss")
    fed = eq.load_federation("phantom", phantom=PHANTOM)
    result = eq.train(fed, hard, rounds=1, out="hard", settings=SMALL)
    assert result.config.method.startswith("python:Hard-") and result.model() is not None
    compared = eq.compare(fed, ["fedavg", hard], seeds=1, rounds=1, out="both", settings=SMALL)
    assert set(compared.table().index) == {"fedavg", "hard"}
    monkeypatch.setattr(outside, "_objects", {})
    with pytest.raises(eq.UserError, match="give it again"):
        eq.load_result("hard").model()
    assert eq.load_result("hard", method=hard).model() is not None
    with pytest.raises(eq.UserError, match="worker processes cannot see"):
        eq.train(fed, hard, rounds=1, workers=2, out="spread", settings=SMALL)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("none.py", "there is no file none.py"),
        ("my_soft:METHD", "did you mean my_soft:METHOD"),
        ("my_soft:SoftClient", "is ABCMeta|is type and no equipoise.Method"),
        ("nowhere.method", "No module named 'nowhere'"),
        ("unclosed.py", r"unclosed.py cannot be loaded: SyntaxError: .*unclosed.py, line 2"),
        ("unmet.py", r"unmet.py cannot be loaded: ModuleNotFoundError: No module named 'nowhere' .*unmet.py, line 1"),
    ],
)
def test_methods_that_are_not_there(method, told):
    Path("unclosed.py").write_text("\ndef wrong(:\n")
    Path("unmet.py").write_text("import nowhere\n")
    with pytest.raises(eq.UserError, match=told):
        eq.train("phantom", method, out="run")
    assert not Path("run").exists()


def test_components_go_on_a_method_by_python_and_by_the_command_line():
    fed = eq.load_federation("phantom", phantom=PHANTOM)
    result = eq.train(
        fed, "fedbn", components=["prox", "margins"], rounds=1, out="python", settings=SMALL | {"prox.mu": 1.0}
    )
    sets = [f"--set=data.phantom.{key}={value}" for key, value in PHANTOM.items()]
    sets += ["--set=train.batch_size=8", "--set=augment.name=flips", "--set=prox.mu=1.0", "--rounds=1", "--out=command"]
    command = [sys.executable, "-m", "equipoise", "run", "--method=fedbn", "--with=margins,prox", *sets]
    subprocess.run(command, check=True, capture_output=True)
    assert_same_bits(all_state(result.path), all_state(Path("command")))
    assert Path("python/config.toml").read_bytes() == Path("command/config.toml").read_bytes()
    with pytest.raises(eq.UserError, match="no component 'margin'; did you mean 'margins'"):
        eq.train(fed, "fedbn", components=["margin"], out="run")
