"""The command line: what it writes, and that bad input gets a clear message, exit code 2, and nothing half-written."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equipoise import methods
from equipoise.cli import app as cli
from equipoise.components.mean_model import MeanModel
from equipoise.engine import runs
from equipoise.engine.disclosure import POOLED, disclosure_sheet, widest_sheet
from equipoise.engine.runs import make_config
from equipoise.methods import get_method, method_names
from harness import TINY, all_state, assert_same_bits, events

QUICK = [f"--set={setting}" for setting in TINY]


@pytest.fixture
def equipoise(monkeypatch, capsys, tmp_path):
    """Run the command line in this process, in an empty folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 200, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["equipoise", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, " ".join(out.split()), " ".join(err.split())

    return call


def write_images(folder: Path, labels: dict[str, int], size: int = 20) -> None:
    """A folder per class with noisy images."""
    rng = np.random.default_rng(0)
    for label, count in labels.items():
        (folder / label).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            pixels = rng.integers(0, 255, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{label}{index}.png")


def test_run_writes_a_run_folder_and_names_its_report(equipoise, tmp_path):
    code, out, _ = equipoise("run", "--out", "one", *QUICK)
    assert code == 0 and "one/report.html" in out
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert {"config.toml", "events.jsonl", "checkpoints", "models", "report.html"} <= names
    assert "exchange" not in names


def test_the_written_config_repeats_the_run(equipoise, tmp_path):
    equipoise("run", "--out", "one", *QUICK)
    equipoise("run", "one/config.toml", "--out", "two")
    assert_same_bits(all_state(tmp_path / "one"), all_state(tmp_path / "two"))


def test_the_written_config_holds_every_option_of_the_method(equipoise):
    equipoise("run", "--method", "fedprox", "--out", "one", *QUICK)
    written = tomllib.loads(Path("one/config.toml").read_text())
    assert written["fedprox"].keys() == get_method("fedprox").options.model_fields.keys()
    code, _, err = equipoise("run", "one/config.toml", "--set", "fedprox.mu=0.5", "--out", "one", "--resume")
    assert code == 2 and f"fedprox.mu was {written['fedprox']['mu']}, is 0.5" in err


def test_predict_gives_probabilities_of_the_global_and_a_personal_model(equipoise):
    write_images(Path("images"), {"a": 1})
    equipoise("run", "--out", "fedavg", *QUICK)
    equipoise("run", "--method", "local", "--out", "local", *QUICK)
    code, out, _ = equipoise("predict", "fedavg", "images/a/a0.png")
    assert code == 0 and "nevus" in out
    code, out, _ = equipoise("predict", "local", "images/a/a0.png", "--site", "site 1")
    assert code == 0 and "nevus" in out
    code, _, err = equipoise("predict", "local", "images/a/a0.png")
    assert code == 2 and "--site" in err
    code, _, err = equipoise("predict", "fedavg", "images/a/missing.png")
    assert code == 2 and "missing.png" in err
    code, out, _ = equipoise("predict", "fedavg", "images/a/a0.png", "images/a/a0.png", "--csv")
    head, *lines = out.split()
    assert code == 0 and head.startswith("image,prediction,nevus") and len(lines) == 2
    name, found, *probabilities = lines[0].split(",")
    assert (name, lines[1]) == ("images/a/a0.png", lines[0]) and found in head.split(",")
    assert abs(sum(map(float, probabilities)) - 1) < 1e-5


def test_methods_lists_each_with_paper_year_change_and_costs(equipoise):
    code, out, _ = equipoise("methods")
    assert code == 0
    row = r"fedrep Collins et al\. 2021 personalisation \(head\).*"
    assert re.search(row + 3 * r" x\d+\.\d", out), "on one line, as wide as it takes"
    assert all(
        f" {name} {get_method(name).paper.split(',')[0]} " in out
        for name in method_names()
        if "no paper" not in get_method(name).paper
    )


def test_methods_show_prints_the_disclosure_sheet(equipoise):
    code, out, _ = equipoise("methods", "show", "fedavg")
    assert code == 0 and "disclosure sheet" in out and "number of local training images" in out
    assert all(f" {action} " in out for action in ("describe", "evaluate", "progress"))


def test_methods_show_tells_what_a_composition_lets_out(equipoise):
    code, out, _ = equipoise("methods", "show", "fedbn+margins+npr")
    assert code == 0 and "margins.survey" in out and "class_loss" in out and "without norm layers" in out
    code, out, err = equipoise("methods", "show", "fedbn+margins+cpa")
    assert code == 2 and "margins" in err and "cpa" in err and not out


@pytest.mark.parametrize("name", ["central", "fedlc", "fednpr-per"])
def test_methods_show_describes_a_method_by_the_first_paragraph_of_its_own_file(equipoise, name):
    """Also where its server is another method's, as central's is FedAvg's."""
    source = (Path(methods.__file__).parent / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    described = source.removeprefix('"""').partition('"""')[0].partition("\n\n")[0].split()
    code, out, _ = equipoise("methods", "show", name)
    assert code == 0 and out.split()[: len(described) + 1] == [name, *described]


def test_the_sheet_of_a_method_has_what_any_option_lets_out_and_that_of_pooling_says_so(equipoise):
    prr = get_method("prr")
    assert "norm" in widest_sheet(prr)["train"], "with a global view batch norm leaves"
    assert "norm" not in disclosure_sheet(prr.client_class(make_config(method="prr")))["train"]
    assert " norm " in equipoise("methods", "show", "prr")[1]
    assert widest_sheet(get_method("central")) == POOLED


def test_the_sheet_of_a_method_has_no_more_than_its_options_let_out():
    """Whatever other components were made from its own, here or in tests."""

    class Leaky(MeanModel):
        def discloses(self):
            return {"train": {"images": "all"}}

    class Careless(get_method("prr").options):
        def components(self):
            return [*super().components(), *([Leaky()] if self.global_view else [])]

    assert "images" not in widest_sheet(get_method("prr"))["train"]
    assert "images" in widest_sheet(dataclasses.replace(get_method("prr"), options=Careless))["train"]


def test_data_inspect_draws_the_federation(equipoise):
    code, out, _ = equipoise("data", "inspect", "phantom", "--chart", "chart.svg")
    assert code == 0 and {"site 1", "nevus"} <= {*re.findall(r">([^<]+)</text>", Path("chart.svg").read_text())}
    code, out, _ = equipoise("data", "inspect", "phantom", "--chart", "chart.png")
    assert code == 0 and "site 1" in out and Path("chart.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "train.ronds=3"], "train.ronds: unknown key"),
        (["--set", "fedprox.mou=3"], "mou: unknown key"),
        (["--set", "nonsense=3"], "nonsense: unknown key"),
        (["--set", "train.rounds=0"], "train.rounds"),
        (["--set", "train.rounds"], "expected key=value"),
        (["--set", "train.loss='hinge'"], "train.loss"),
        (["--set", "net.name='vgg19'"], "net.name"),
        (["--method", "fedmagic"], "there is no method 'fedmagic'"),
        (["--data", "imagenet"], "imagenet"),
        (["no-such-preset"], "neither a file nor a preset"),
        (["--device", "tpu"], "tpu"),
        (["--set", "train.min_sites=99"], "min_sites"),
        (["--set", "evaluation.first_round=99"], "first_round"),
        (["--set", "fedprox.mu=0.1"], "the method is fedavg, on which options of fedprox have no effect"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_written(equipoise, arguments, message):
    code, _, err = equipoise("run", *arguments, "--out", "out")
    assert code == 2 and message in err
    assert not Path("out").exists()


def test_broken_toml_is_named(equipoise):
    Path("broken.toml").write_text("[train\nrounds = 2")
    code, _, err = equipoise("run", "broken.toml")
    assert code == 2 and "broken.toml" in err


def test_an_unreadable_image_is_named_and_can_be_skipped(equipoise):
    write_images(Path("images"), {"a": 12, "b": 12})
    Path("images/a/torn.png").write_bytes(b"not an image")
    common = ("--out", "out", "--rounds", "1", "--set", "data.size=16", "--set", "data.store='store'")
    code, _, err = equipoise("run", "--data", "folder:images", *common)
    assert code == 2 and "torn.png" in err and not Path("out").exists()
    code, _, _ = equipoise("run", "--data", "folder:images", *common, "--skip-unreadable")
    assert code == 0
    code, _, err = equipoise("run", "--data", "folder:images", *common[2:], "--out", "more")
    assert code == 2 and "torn.png" in err, "a store that lacks an image is not for runs that may skip none"


def test_a_folder_of_nothing_but_unreadable_images_is_refused(equipoise):
    for name in ("a", "b"):
        Path("images", name).mkdir(parents=True)
        Path("images", name, "torn.png").write_bytes(b"not an image")
    settings = ("--set", "data.size=16", "--set", "data.store='store'", "--skip-unreadable")
    code, _, err = equipoise("run", "--data", "folder:images", "--out", "out", *settings)
    assert code == 2 and "none of the 2 images of folder:images can be read" in err and "torn.png" in err
    assert not Path("out").exists() and not list(Path("store").glob("*px*/index.json"))


def test_labels_outside_the_class_list_and_empty_classes_are_named(equipoise):
    write_images(Path("images"), {"a": 6, "b": 6})
    rows = [f"images/{c}/{c}{i}.png,{c}" for c in "ab" for i in range(6)]
    Path("list.csv").write_text("path,label\n" + "\n".join(rows))
    base = ("run", "--data", "manifest:list.csv", "--out", "out", "--set", "data.store='store'")
    code, _, err = equipoise(*base, "--set", "data.classes=['a', 'b', 'a']")
    assert code == 2 and "a is named twice" in err
    code, _, err = equipoise(*base, "--set", "data.classes=['a']")
    assert code == 2 and "b" in err
    code, _, err = equipoise(*base, "--set", "data.classes=['a','b','c']")
    assert code == 2 and "c" in err
    assert not Path("out").exists()


def test_a_site_without_training_images_is_named(equipoise):
    write_images(Path("images"), {"a": 8, "b": 8})
    places = [("here" if i < 6 else "there", "train" if i < 5 else "test") for i in range(8)]
    rows = [f"images/{c}/{c}{i}.png,{c},{site},{part}" for c in "ab" for i, (site, part) in enumerate(places)]
    Path("list.csv").write_text("path,label,site,split\n" + "\n".join(rows))
    settings = ("--set", "data.store='store'", "--set", "data.size=16")
    base = ("run", "--data", "manifest:list.csv", "--out", "out", "--rounds", "1", *settings)
    code, _, err = equipoise(*base, "--set", "data.training_sites=['here','there']")
    assert code == 2 and "there" in err and not Path("out").exists()
    code, _, _ = equipoise(*base)
    assert code == 0


def test_a_run_is_not_overwritten_and_another_config_not_resumed(equipoise):
    equipoise("run", "--out", "out", *QUICK)
    code, _, err = equipoise("run", "--out", "out", *QUICK)
    assert code == 2 and "--resume" in err
    code, _, err = equipoise("run", "--out", "out", *QUICK, "--resume", "--seed", "7")
    assert code == 2 and "another config" in err
    code, _, _ = equipoise("run", "--out", "out", *QUICK, "--resume")
    assert code == 0
    written = Path("out/config.toml")
    written.write_text(written.read_text().replace("\nseed = 1\n", "\nseed = 7\n"))
    code, _, err = equipoise("resume", "out")
    assert code == 2 and "config.toml was edited" in err and "undo the edit" in err


def test_a_demo_replaces_its_own_runs_and_nothing_else(equipoise, tmp_path, monkeypatch):
    whole = runs.make_config
    monkeypatch.setattr(runs, "make_config", lambda source, **top: whole(None, TINY, method=top["method"]))
    mine = tmp_path / "runs" / "fedavg" / "config.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text("my own")
    code, _, err = equipoise("demo", "--out", "runs", "--methods", "fedavg")
    assert code == 2 and "runs is not empty and is no folder of a demo" in err
    assert [path.read_text() for path in tmp_path.rglob("*.toml")] == ["my own"]

    assert equipoise("demo", "--methods", "fedavg,oops")[0] == 2 and not Path("demo").exists()
    assert equipoise("demo", "--methods", "fedavg,local")[0] == 0
    note = Path("demo/fedavg/notes.txt")
    note.write_text("look at site 2")
    with Path("demo/fedavg/events.jsonl").open("a") as events:
        events.write('{"event": "left by the run before"}\n')
    code, out, _ = equipoise("demo", "--methods", "fedavg")
    assert code == 0 and "demo/report.html" in out and note.read_text() == "look at site 2"
    assert "left by the run before" not in Path("demo/fedavg/events.jsonl").read_text()
    assert Path("demo/local/events.jsonl").exists()


def test_a_demo_leaves_out_a_method_whose_encoder_is_not_installed(equipoise, tmp_path, monkeypatch):
    whole = runs.make_config

    def tiny(source, **top):
        own = ["net.name=adapter", "net.encoder=efficientnet-lite0"] if top["method"] == "closed" else []
        return whole(None, [*TINY, *own], method=top["method"])

    monkeypatch.setattr(runs, "make_config", tiny)
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    code, out, _ = equipoise("demo", "--methods", "fedavg,closed")
    assert code == 0 and "The demo leaves closed out" in out and "install the extra lite" in out
    assert Path("demo/fedavg/events.jsonl").exists() and not Path("demo/closed").exists()
    assert equipoise("demo", "--methods", "closed", "--out", "other")[0] == 2 and not Path("other").exists()


def test_the_demo_gives_the_closed_form_alone_a_pretrained_encoder():
    assert make_config("demo", method="closed").net.encoder == "efficientnet-lite0"
    assert make_config("demo", method="fedavg").net.encoder is None


def test_a_run_that_goes_on_elsewhere_says_so(equipoise, tmp_path, monkeypatch):
    from equipoise.engine import opening

    settings = [*QUICK, "--set=train.rounds=1"]
    assert equipoise("run", "--out", "one", *settings)[0] == 0
    (start,) = events(tmp_path / "one", "start")
    assert start["device"] == "cpu"
    monkeypatch.setattr(opening, "first_event", lambda path: {**start, "device": "gpu"})
    assert equipoise("run", "--out", "one", *settings, "--resume")[0] == 0
    assert [e["text"] for e in events(tmp_path / "one", "warning")] == [
        "the run began on gpu and continues on cpu, so its scores may differ slightly from either's; add --device gpu"
    ]


@pytest.mark.parametrize("changed", ["pixels", "a label", "nothing"])
def test_a_run_goes_on_only_with_the_images_it_began_with(equipoise, changed):
    write_images(Path("images"), {"a": 20, "b": 20})
    base = ("run", "--data", "folder:images", "--out", "out", "--rounds", "1", "--set", "data.size=16")
    drawn = ("--set", "data.partition='dirichlet_per_class'", "--set", "data.sites=2", "--set", "data.alpha=5.0")
    assert equipoise(*base, *drawn, "--set", "data.store='store'")[0] == 0
    match changed:
        case "pixels":
            for path in sorted(Path("images/a").iterdir()):
                Image.new("RGB", (20, 20), "red").save(path)
        case "a label":
            Path("images/a/a0.png").rename("images/b/a0.png")
    code, _, err = equipoise(*base, *drawn, "--set", "data.store='other'", "--resume")
    assert (code, "data has changed" in err) == ((0, False) if changed == "nothing" else (2, True))


def test_a_run_does_not_go_on_with_other_data_or_a_damaged_log(equipoise):
    write_images(Path("images"), {"a": 20, "b": 20})
    base = ("run", "--data", "folder:images", "--out", "out", "--rounds", "2")
    settings = ("--set", "data.store='store'", "--set", "data.size=16")
    assert equipoise(*base, *settings)[0] == 0
    log = Path("out/events.jsonl").read_bytes()
    Path("out/events.jsonl").write_bytes(log[:100])
    code, _, err = equipoise(*base, *settings, "--resume")
    assert code == 2 and "events.jsonl" in err and Path("out/events.jsonl").read_bytes() == log[:100]
    Path("out/events.jsonl").write_bytes(log)
    write_images(Path("images"), {"a": 30, "b": 20})
    code, _, err = equipoise(*base, *settings, "--resume")
    assert code == 2 and "data has changed" in err


@pytest.mark.parametrize("damage", ["a site's state is gone", "a site's state is cut", "the selected round is cut"])
def test_damage_that_a_resumed_run_would_meet_later_is_told_at_once_and_costs_nothing(equipoise, tmp_path, damage):
    # Nothing is learned, so that the first round is as good as any, and the one that is selected.
    settings = [*QUICK, "--set=train.rounds=3", "--set=train.optimiser.lr=1e-12", "--set=checkpoint.keep=1"]
    equipoise("run", "--method", "prr", "--out", "one", "--anyway", *settings)
    log = tmp_path / "one" / "events.jsonl"
    before = log.read_bytes()
    chosen = events(tmp_path / "one", "selection")[0]["round"]
    assert chosen < 3
    states = sorted((tmp_path / "one" / "sites").glob("*/*.safetensors"))
    match damage:
        case "a site's state is gone":
            for state in states:
                state.unlink()
        case "a site's state is cut":
            for state in states:
                state.write_bytes(state.read_bytes()[:20])
        case _:
            server = tmp_path / "one" / "checkpoints" / f"round-{chosen:05d}" / "server.safetensors"
            server.write_bytes(server.read_bytes()[:20])
    code, _, err = equipoise("run", "one/config.toml", "--out", "one", "--resume")
    assert code == 2 and "is damaged" in err and "delete the folder" in err
    assert log.read_bytes() == before


def test_a_damaged_checkpoint_gives_way_to_the_one_before(equipoise, tmp_path):
    equipoise("run", "--out", "out", *QUICK, "--set=train.rounds=3")
    before = all_state(tmp_path / "out")
    server = tmp_path / "out" / "checkpoints" / "round-00003" / "server.safetensors"
    server.unlink()  # tensors in `before` are mapped from it
    server.write_bytes(b"torn")
    (tmp_path / "out" / "checkpoints" / "round-stray").mkdir()
    code, out, _ = equipoise("run", "--out", "out", *QUICK, "--set=train.rounds=3", "--resume")
    (tmp_path / "out" / "checkpoints" / "round-stray").rmdir()
    assert code == 0 and "resumed after round 2" in out
    assert_same_bits(before, all_state(tmp_path / "out"))


def test_training_that_diverges_is_said_plainly(equipoise):
    code, _, err = equipoise("run", "--out", "out", *QUICK, "--set=train.optimiser.lr=1e20")
    assert code == 2 and "lower train.optimiser.lr" in err


@pytest.mark.parametrize("workers", [1, 2])
def test_so_it_is_where_models_stay_at_their_sites(equipoise, workers):
    settings = (f"--set=compute.workers={workers}", "--set=train.optimiser.lr=1e20")
    code, _, err = equipoise("run", "--out", "out", "--method", "local", *QUICK, *settings)
    assert code == 2 and "which the site keeps, holds NaN" in err and "lower train.optimiser.lr" in err


def test_a_run_is_not_written_among_other_files(equipoise):
    write_images(Path("images"), {"a": 1})
    code, _, err = equipoise("run", "--out", "images", *QUICK)
    assert code == 2 and "holds no run" in err and [p.name for p in Path("images").iterdir()] == ["a"]
    code, _, err = equipoise("run", "--set=name='../escape'", *QUICK)
    assert code == 2 and "folder name" in err


def test_a_full_disk_is_said_plainly(equipoise, monkeypatch):
    from equipoise.engine import checkpoint

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints")

    monkeypatch.setattr(checkpoint, "write_payload", full)
    code, _, err = equipoise("run", "--out", "out", *QUICK)
    assert code == 2 and "No space left on device" in err and "--resume" in err


def test_kill_in_mid_round_and_resume_give_the_same_weights(tmp_path):
    settings = [*QUICK, "--set=train.rounds=6", "--set=data.phantom.images=400"]

    def start(out: str, *more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "equipoise", "run", "--out", out, *settings, *more]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    assert start("straight").wait(120) == 0
    killed = start("killed")
    log = tmp_path / "killed" / "events.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and '"event": "round", "round": 2' in log.read_text()):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    assert start("killed", "--resume").wait(120) == 0
    assert events(tmp_path / "killed", "resumed")
    assert_same_bits(all_state(tmp_path / "straight"), all_state(tmp_path / "killed"))


def test_the_phantom_takes_no_raw_files(equipoise):
    code, _, err = equipoise("data", "prepare", "phantom", "--from", ".")
    assert code == 2 and "leave --from out" in err


def test_preparing_says_how_many_images_were_left_out(equipoise, tmp_path):
    write_images(tmp_path / "mine", {"a": 8, "b": 8})
    (tmp_path / "mine" / "a" / "a0.png").write_bytes(b"no image")
    code, out, _ = equipoise("data", "prepare", "folder:mine", "--skip-unreadable", "--size", "16")
    assert code == 0 and "15 images in" in out and "1 missing or unreadable image was left out" in out


def test_a_folder_without_known_images_names_the_known_kinds(equipoise, tmp_path):
    write_images(tmp_path / "mine", {"a": 1, "b": 1})
    for path in (tmp_path / "mine").glob("*/*.png"):
        path.rename(path.with_suffix(".xyz"))
    code, _, err = equipoise("data", "inspect", "folder:mine")
    assert code == 2 and ".png" in err


def test_without_validation_images_the_last_round_is_reported_and_said_to_be(equipoise, tmp_path):
    write_images(tmp_path / "mine", {"a": 1, "b": 1})
    code, out, _ = equipoise("run", "--data", "folder:mine", "--out", "one", "--rounds", "2", "--set=data.size=16")
    assert code == 0 and "selected round 2 (the last: there are no validation images to choose by)" in out


def test_a_mistake_of_the_command_line_is_not_blamed_on_the_file_alone(equipoise, tmp_path):
    (tmp_path / "mine.toml").write_text("[train]\nrounds = 1\n")
    code, _, err = equipoise("run", "mine.toml", "--set=train.epoch=1", "--out", "one")
    assert code == 2 and "mine.toml with what the command line sets is not valid" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "fedavg", "--set", "method=prr"), "an option of the command line gives method, too"),
        (("--data", "phantom", "--set", "data.name=pbc"), "an option of the command line gives data.name, too"),
        (("--rounds", "2", "--set", "train.rounds=3"), "an option of the command line gives train.rounds, too"),
        (("--set", "train.optimiser.lr=1e308"), "at most 1e+30"),
        (("--set", "train.schedule.gamma=1e300"), "less than or equal to 1"),
        (("--set", f"train.batch_size={10**23}"), "too large"),
        (("--set", "train.optimiser.betas=[0.9, 1e40]"), "train.optimiser.betas"),
        (("--set", "compute.threads=100000"), "less than or equal to 1024"),
        (("--set", "augment.size=100000"), "less than or equal to 1024"),
        (("--set", "train.schedule.milestones=[-1]"), "greater than or equal to 0"),
        (("--method", "fednpr", "--set", "fednpr.weight=3"), "unknown key: there are no settings here"),
    ],
)
def test_values_that_nothing_could_compute_with_are_refused(equipoise, options, message):
    code, _, err = equipoise("run", "--out", "out", *options)
    assert code == 2 and message in err and not Path("out").exists()


def test_memory_that_is_not_there_is_no_fault_of_the_program(equipoise):
    options = ("--method", "fediic", *QUICK, "--set", f"fediic.projection={10**15}")
    code, _, err = equipoise("run", "--out", "out", *options)
    assert code == 2 and "not enough memory" in err


def test_a_report_replaces_reports_alone(equipoise):
    equipoise("run", "--out", "one", *QUICK)
    Path("notes.txt").write_text("precious")
    code, _, err = equipoise("report", "one", "--out", "notes.txt")
    assert code == 2 and "is no report" in err and Path("notes.txt").read_text() == "precious"
    assert equipoise("report", "one", "--out", "one/report.html")[0] == 0


def test_a_finished_run_whose_log_was_cut_keeps_its_report(equipoise):
    equipoise("run", "--out", "one", *QUICK)
    before = Path("one/report.html").read_text()
    log = Path("one/events.jsonl")
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-2]))
    code, _, err = equipoise("report", "one")
    assert code == 2 and "ends before the run did" in err and Path("one/report.html").read_text() == before


def test_a_folder_that_may_not_be_read_is_named(equipoise, monkeypatch):
    write_images(Path("images"), {"a": 20, "b": 20})
    Path("images/b/more").mkdir()
    whole = os.scandir

    def scandir(path: str) -> object:  # root, who may run these tests, may read any folder
        if str(path).endswith("more"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(os, "scandir", scandir)
    code, _, err = equipoise("run", "--data", "folder:images", "--out", "out")
    assert code == 2 and "images/b/more cannot be read: permission denied" in err


def test_a_path_that_cannot_be_is_named_with_the_reason(equipoise):
    Path("file").write_text("")
    code, _, err = equipoise("run", "--out", "file/run", *QUICK)
    assert code == 2 and "file/run" in err and "Not a directory" in err and "Errno" not in err
