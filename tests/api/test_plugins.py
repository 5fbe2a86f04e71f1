"""Plug-ins of all six kinds, written outside the package: from Python, the command line, a study and on Flower."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import equipoise as eq
from equipoise.core import plugins
from equipoise.engine.runs import make_config
from equipoise.hospitals.allowed_plugins import check_plugins
from harness import all_state, assert_same_bits, events, server_state

SOURCES = {
    "shy.py": '''"""Shy: FedAvg whose server moves half of the way to the mean."""

import equipoise as eq


class Server(eq.FedAvgServer):
    """Moves half of the way."""

    def merge(self, replies, number):
        mean = super().merge(replies, number)
        old = self.state.model
        return {k: old[k].lerp(v, 0.5) if v.is_floating_point() else v for k, v in mean.items()}


METHOD = eq.Method(Server, eq.FedAvgClient, "none", 2026, "server step")
''',
    "small_logits.py": '''"""Small logits: their squares cost a little."""

from pydantic import Field

import equipoise as eq


class Site(eq.SiteSide):
    """Adds the term."""

    def loss(self, batch, out, loss):
        return loss + self.options.weight * out.logits.square().mean()


class SmallLogits(eq.Component):
    """Small logits."""

    name = "small-logits"
    rank = 45
    Site = Site
    weight: float = Field(0.01, ge=0, description="factor of the term")


COMPONENT = SmallLogits
''',
    "two_layers.py": '''"""A net of two layers."""

from torch import nn


def make(num_classes, channels):
    """The net."""
    first = nn.Sequential(nn.Conv2d(channels, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(first, nn.Flatten(), nn.Linear(8, num_classes))


NET = make
''',
    "stripes.py": '''"""Stripes: images in folders site/class."""

from pathlib import Path

import equipoise as eq

TITLE = "Stripes, 2 classes at 3 sites"
SIZE = 16
PARTITION = "source"
CLASSES = ("level", "steep")


def listing(config, root):
    """Every PNG under images/."""
    records = [
        eq.Record(file.stem, eq.Location(file), CLASSES.index(file.parts[-2]), file.parts[-3], group=file.stem)
        for file in sorted((Path(root) / "images").glob("*/*/*.png"))
    ]
    return eq.Listing(config.name, CLASSES, tuple(records))
''',
    "bent.py": '''"""A loss."""

from torch.nn import functional as F


def bent(logits, labels, class_counts):
    """Cross entropy by inverse frequency."""
    return F.cross_entropy(logits, labels, weight=class_counts.sum() / (class_counts + 1))
''',
    "kappa.py": '''"""A metric."""

import equipoise as eq


def kappa(tally: eq.Tally) -> float:
    """Cohen's kappa."""
    shares = tally.confusion / tally.confusion.sum()
    chance = float(shares.sum(0) @ shares.sum(1))
    return (tally.accuracy - chance) / (1 - chance) if chance < 1 else 0.0
''',
}
SETTINGS = {"train.batch_size": 8, "augment.name": "flips", "train.loss": "bent.py:bent",
            "evaluation.metric": "kappa.py:kappa", "small-logits.weight": 0.02}  # fmt: skip
SETS = [f"--set={key}={value}" for key, value in SETTINGS.items()]


@pytest.fixture(autouse=True)
def _outside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    for name, text in SOURCES.items():
        assert len(text.splitlines()) < 40
        Path(name).write_text(text)
    random = np.random.default_rng(0)
    for site in "ABC":
        for label, axis in (("level", 0), ("steep", 1)):
            folder = Path("images", site, label)
            folder.mkdir(parents=True)
            for number in range(20):
                pixels = random.integers(0, 120, (16, 16)) + 130 * (np.indices((16, 16))[axis] % 4 < 2)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{label}{site}{number}.png")


def trained(out: str = "python", **more) -> eq.Result:
    fed = eq.load_federation("stripes.py", root=".")
    return eq.train(
        fed, "shy.py", components=["small_logits.py"], net="two_layers.py", rounds=2, out=out, settings=SETTINGS, **more
    )


def equipoise(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "equipoise", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def folders_alike(first: str, second: str, *others: str) -> bool:
    """Whether two runs left the same files, with the same config and the same weights."""
    names = [
        sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file()) for folder in (first, second)
    ]
    same = {"config.toml", *(name for name in names[0] if name.startswith("models/") and name.endswith("safetensors"))}
    assert names[0] == names[1]
    return all(Path(first, name).read_bytes() == Path(second, name).read_bytes() for name in same - {*others})


def test_six_plugins_by_python_and_by_the_command_line_make_one_run():
    result = trained()
    parts = ["--method=shy.py", "--with=small_logits.py", "--net=two_layers.py", "--data=stripes.py", "--root=."]
    equipoise("run", *parts, "--rounds=2", "--out=command", *SETS, "--workers=2")
    assert_same_bits(all_state(result.path), all_state(Path("command")))
    config, other = (Path(folder, "config.toml").read_text() for folder in ("python", "command"))
    assert config == other.replace("workers = 2", "workers = 1")
    Path("mine.toml").write_text(config)
    equipoise("run", "mine.toml", "--out=file")
    assert_same_bits(all_state(result.path), all_state(Path("file")))
    assert folders_alike("python", "file") and folders_alike("python", "command", "config.toml")
    assert "kappa" in result.scores().columns and result.model() is not None
    assert result.config.methods["small-logits"] == {"weight": 0.02}
    kinds = {plugin["kind"]: plugin for plugin in events(result.path, "start")[0]["plugins"]}
    assert set(kinds) == set(plugins.GROUPS)
    assert kinds["method"]["origin"] == str(Path("shy.py").resolve())
    assert result.config.plugins["method shy.py"] == plugins.described("method", "shy.py").digest


STUDY = """name = "mine"
seeds = [1]
[settings]
components = ["small_logits.py"]
data = { name = "stripes.py", root = "." }
train = { rounds = 2, batch_size = 8, loss = "bent.py:bent" }
augment.name = "flips"
net.name = "two_layers.py"
evaluation.metric = "kappa.py:kappa"
small-logits.weight = 0.02
[[row]]
name = "six"
method = "shy.py"
[[row]]
name = "more"
method = "fedavg"
"""


def test_a_study_compares_plugins_of_all_six_kinds_and_makes_the_same_run():
    Path("study.toml").write_text(STUDY)
    equipoise("study", "study.toml")
    rows = json.loads(Path("studies/mine/summary.json").read_text())["rows"]
    assert [len(row["seeds"]) for row in rows] == [1, 1]
    six = eq.load_result("studies/mine/runs/six-seed1")
    assert {plugin["kind"] for plugin in events(six.path, "start")[0]["plugins"]} == set(plugins.GROUPS)
    assert_same_bits(six.model().state_dict(), trained().model().state_dict())
    assert "kappa" in six.scores().columns
    fed = eq.load_federation("stripes.py", root=".")
    settings = {key: value for key, value in SETTINGS.items() if "small" not in key}
    found = eq.compare(
        fed, ["shy.py"], components=["small_logits.py"], net="two_layers.py", rounds=1, seeds=2, out="compared",
        settings=settings,
    )  # fmt: skip
    table = found.table("kappa")
    assert {*table.index} == {"shy", "shy+small-logits"}
    assert ((table["low"] <= table["mean"]) & (table["mean"] <= table["high"])).all()


def test_a_plugin_that_changes_is_told_by_name():
    result = trained()
    Path("shy.py").write_text(SOURCES["shy.py"].replace("0.5", "0.4"))
    with pytest.raises(eq.UserError, match=r"method shy.py has changed.*restore its file"):
        result.resume(rounds=3)
    with pytest.raises(eq.UserError, match=r"method shy.py has changed since the run in python began"):
        trained(resume=True)


def test_a_site_refuses_plugins_that_it_does_not_allow_or_has_otherwise():
    config = make_config(None, ["net.name=two_layers.py", "train.loss=bent.py:bent"], method="shy.py")
    raw = {"method": "shy.py", "net": {"name": "two_layers.py"}, "train": {"loss": "bent.py:bent"}}
    raw["plugins"] = config.plugins
    names = ["shy.py", "two_layers.py", "bent.py:bent"]
    check_plugins(raw, names)
    with pytest.raises(eq.UserError, match=r'does not allow the net two_layers.py.*plugins = \["two_layers.py"\]'):
        check_plugins(raw, ["shy.py", "bent.py:bent"])
    Path("shy.py").write_text(SOURCES["shy.py"] + "\n")
    with pytest.raises(eq.UserError, match=r"the method shy.py at this site is not the server's"):
        check_plugins(raw, names)


def test_objects_of_python_stand_for_all_six_kinds():
    import importlib.util

    held = {}
    for name in SOURCES:
        spec = importlib.util.spec_from_file_location("held_" + name[:-3], name)
        held[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(held[name])  # not in sys.modules: as in a notebook
    fed = eq.load_federation(held["stripes.py"], root=".")
    component = held["small_logits.py"].SmallLogits(weight=0.02)
    settings = {**SETTINGS, "train.loss": held["bent.py"].bent, "evaluation.metric": held["kappa.py"].kappa}
    del settings["small-logits.weight"]
    result = eq.train(
        fed, held["shy.py"].METHOD, components=[component], net=held["two_layers.py"].make, rounds=2, out="objects",
        settings=settings,
    )  # fmt: skip
    assert_same_bits(all_state(trained().path), all_state(result.path))
    assert all(name.split(" ")[1].startswith("python:") for name in result.config.plugins if "source" not in name)


def test_entry_points_of_installed_packages_are_found_and_listed(monkeypatch):
    package = Path("site")
    (package / "lab-1.2.dist-info").mkdir(parents=True)
    (package / "lab-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.2\n")
    (package / "lab-1.2.dist-info" / "entry_points.txt").write_text(
        "[equipoise.methods]\nshy = lab_shy:METHOD\n[equipoise.losses]\nbent = lab_bent:bent\n"
    )
    (package / "lab_shy.py").write_text(SOURCES["shy.py"])
    (package / "lab_bent.py").write_text(SOURCES["bent.py"])
    monkeypatch.setenv("PYTHONPATH", f"{package.resolve()}:{':'.join(sys.path)}")
    small = ["--set=data.phantom.images=120", "--set=data.phantom.size=16", "--rounds=1"]
    equipoise("run", "--method=shy", "--set=train.loss=bent", *small, "--out=entry")
    plugin = events(Path("entry"), "start")[0]["plugins"][0]
    assert (plugin["name"], plugin["origin"]) == ("shy", "lab 1.2")
    assert "lab 1.2" in equipoise("methods").stdout
    refused = subprocess.run(
        [sys.executable, "-m", "equipoise", "run", "--method=shhy"], check=False, capture_output=True, text=True
    )
    assert refused.returncode == 2 and "did you mean 'shy'" in refused.stderr


@pytest.mark.slow
def test_a_pilot_on_flower_gives_the_bits_of_a_local_run():
    parts = ["--method=shy.py", "--with=small_logits.py", "--net=two_layers.py", "--data=stripes.py", "--root=."]
    equipoise("pilot", *parts, *SETS, "--rounds=2", "--out=pilot")
    assert {plugin["kind"] for plugin in events(Path("pilot"), "start")[0]["plugins"]} == set(plugins.GROUPS)
    assert_same_bits(server_state(trained().path), server_state(Path("pilot")))
