"""Everyday commands: going on with runs, listing them, scoring them on other data, and names that were mistyped."""

from __future__ import annotations

import csv
import io
import re
import tomllib
from pathlib import Path

import click
import numpy as np
import pytest
import typer
from PIL import Image
from rich.console import Console
from test_cli import equipoise  # noqa: F401

from equipoise.api.progress import bars
from equipoise.cli.app import app
from equipoise.cli.screen import EXAMPLE, console, plain_table
from equipoise.contract.config import Config
from equipoise.core.definitions import arguments, modules_in, summary
from equipoise.methods import get_method, method_names
from harness import TINY, all_state, assert_same_bits, events

QUICK = [f"--set={setting}" for setting in TINY]


def images(folder: str, classes: tuple[str, ...], count: int = 6) -> None:
    """A folder per class with noisy images."""
    random = np.random.default_rng(1)
    for name in classes:
        Path(folder, name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 255, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path(folder, name, f"{name}{number}.png"))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_cuts_the_label_of_a_bar_and_no_number(width):
    wide = Console(width=width, file=io.StringIO())
    progress = bars(wide, "[bold]{task.description}")
    progress.add_task("fedavg+margins-manifest-of-all-my-images-seed1", total=200, completed=100)
    wide.print(progress)
    (line,) = wide.file.getvalue().splitlines()
    assert "100/200" in line and line.rstrip().endswith("-:--:--") and line.startswith("fedavg") and len(line) <= width


# ---- going on ------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_beyond_its_end_as_if_it_had_been_longer(equipoise):  # noqa: F811
    few = [setting for setting in QUICK if "rounds" not in setting]
    assert equipoise("run", "--out", "long", "--rounds", "4", *few)[0] == 0
    assert equipoise("run", "--out", "short", "--rounds", "2", *few)[0] == 0
    code, out, _ = equipoise("run", "short", "--rounds", "3")
    assert code == 0 and "resumed after round 2" in out and "train.rounds was 2, is 3" in out
    assert "balanced accuracy on validation" in out.partition("resumed after")[2]
    assert equipoise("resume", "short", "--rounds", "4")[0] == 0
    assert_same_bits(all_state(Path("long")), all_state(Path("short")))
    assert tomllib.loads(Path("short/config.toml").read_text())["train"]["rounds"] == 4
    code, _, err = equipoise("run", "short", "--rounds", "2")
    assert code == 2 and "has 4 rounds and cannot be made shorter" in err
    code, _, err = equipoise("run", "short", "--rounds", "5", "--seed", "9")
    assert code == 2 and "another config" in err


@pytest.mark.parametrize(("rule", "last"), [("mean_last", 2), ("last", 5)])
def test_a_longer_run_reports_what_its_rule_asks_for(equipoise, rule, last):  # noqa: F811
    rules = [*QUICK, f"--set=evaluation.rule='{rule}'", f"--set=evaluation.last={last}", "--set=train.rounds=3"]
    equipoise("run", "--out", "long", *rules)
    equipoise("run", "--out", "short", *rules[:-1], "--set=train.rounds=2")
    equipoise("resume", "short", "--rounds", "3")
    long, short = ([{**e, "seconds": 0} for e in events(Path(name), "final")] for name in ("long", "short"))
    assert long == short and short[0]["round"] == 3


def test_resume_needs_a_run(equipoise):  # noqa: F811
    code, _, err = equipoise("resume", "nowhere")
    assert code == 2 and "holds no run" in err


# ---- what runs left ------------------------------------------------------------------------------------------------


def test_runs_are_listed_with_their_scores(equipoise):  # noqa: F811
    code, out, _ = equipoise("runs")
    assert code == 0 and "holds no run" in out
    equipoise("run", "--out", "runs/mine", *QUICK)
    code, out, _ = equipoise("runs")
    assert re.search(r"mine fedavg phantom finished 2 \d+\.\d%", out)
    Path("runs/mine/hospital").mkdir()
    Path("runs/mine/hospital/events.jsonl").write_text('{"event": "start", "site": "north"}\n')
    again = equipoise("runs")
    assert again[:2] == (0, out), "a hospital's own log lies beside a pilot's"


def test_a_finished_model_is_scored_on_other_images(equipoise):  # noqa: F811
    equipoise("run", "--out", "run", *QUICK)
    code, out, _ = equipoise("evaluate", "run")
    own = events(Path("run"), "final")[-1]["metrics"]["balanced_accuracy"]
    assert code == 0 and f"{100 * own:.1f}" in out
    images("other", ("melanoma", "nevus"))
    code, out, _ = equipoise("evaluate", "run", "--data", "folder:other", "--csv")
    lines = list(csv.DictReader(io.StringIO(out.replace(" ", "\n").replace("\nmelanoma", " melanoma"))))
    assert code == 0 and {line["n"] for line in lines} == {"12"}
    images("strange", ("bone", "nevus"))
    code, _, err = equipoise("evaluate", "run", "--data", "folder:strange")
    assert code == 2 and "does not know: bone" in err


def test_no_score_or_interval_is_cut_off_on_a_narrow_screen(monkeypatch, equipoise):  # noqa: F811
    equipoise("run", "--out", "run", *QUICK)
    monkeypatch.setattr(console, "_width", 80)
    code, out, _ = equipoise("evaluate", "run", "--interval")
    assert code == 0 and "…" not in out and "global model" in out.splitlines()[0]


def test_a_narrow_table_folds_words_and_keeps_numbers_whole(monkeypatch):
    monkeypatch.setattr(console, "_width", 50)
    rows = [("mean of sites", "F", "twenty to twenty-nine", "100.0\n100-100", "83.3\n17-100", "7.5\n5-9")]
    with console.capture() as shown:
        console.print(plain_table(("site", "sex", "age", "one", "two", "three"), rows))
    lines = shown.get()
    assert "…" not in lines and max(map(len, lines.splitlines())) <= 50
    assert all(text in lines for text in ("mean of sites", "100-100", "17-100", "83.3", "sex"))


def test_a_folder_of_images_is_predicted(equipoise):  # noqa: F811
    equipoise("run", "--out", "run", *QUICK)
    images("new", ("a", "b"), 2)
    code, out, _ = equipoise("predict", "run", "new", "new/a/a0.png", "--csv")
    assert code == 0 and [line.split(",")[0] for line in out.split()[1:]] == [
        "new/a/a0.png", "new/a/a1.png", "new/b/b0.png", "new/b/b1.png", "new/a/a0.png",
    ]  # fmt: skip


def test_a_commented_config_runs_as_it_stands_and_holds_every_key(equipoise):  # noqa: F811
    code, out, _ = equipoise("init", "mine.toml", "--method", "fedprox", "--data", "phantom")
    assert code == 0 and "equipoise run mine.toml" in out
    text = Path("mine.toml").read_text()
    everything = re.sub(r"(?m)^# (\w+ = [^ ])", r"\1", text)
    assert tomllib.loads(text)["method"] == "fedprox" and "mu" in tomllib.loads(everything)["fedprox"]
    assert tomllib.loads(everything)["train"]["rounds"] == Config().train.rounds
    assert equipoise("run", "mine.toml", "--out", "run", *QUICK)[0] == 0
    assert equipoise("init", "mine.toml")[0] == 2 and Path("mine.toml").read_text() == text


def test_common_settings_have_options(equipoise):  # noqa: F811
    quick = [setting for setting in QUICK if not {"batch", "epochs"} & {*re.findall(r"[a-z]+", setting)}]
    options = ("--epochs", "2", "--batch-size", "9", "--lr", "0.5", "--net", "vgg16-slim", "--set", "augment.size=32")
    assert equipoise("run", "--out", "run", *options, *quick)[0] == 0
    written = tomllib.loads(Path("run/config.toml").read_text())
    assert (written["train"]["epochs"], written["train"]["batch_size"]) == (2, 9)
    assert (written["train"]["optimiser"]["lr"], written["net"]["name"]) == (0.5, "vgg16-slim")
    code, _, err = equipoise("run", "--lr", "0.5", "--set", "train.optimiser.lr=0.1")
    assert code == 2 and "an option of the command line gives train.optimiser.lr, too" in err


# ---- help and mistyped names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("run", "--method", "fedagv"), "did you mean 'fedavg'?"),
        (("run", "--method", "FedAvg"), "did you mean 'fedavg'?"),
        (("run", "--method", "PRR-Imbalance"), "did you mean 'prr'?"),
        (("run", "dem"), "did you mean 'demo'?"),
        (("run", "--data", "phanton"), "did you mean phantom?"),
        (("run", "--data", "manifst:x.csv"), "did you mean manifest:x.csv?"),
        (("runs", "nowhere"), "nowhere is no folder; name the folder that holds the runs' folders"),
        (("run", "--data", "x.csv"), "did you mean manifest:x.csv?"),
        (("run", "--data", "here"), "did you mean folder:here?"),
        (("run", "--set", "train.lr=0.1"), "did you mean 'train.optimiser.lr'?"),
        (("run", "--set", "epochs=2"), "did you mean 'train.epochs'?"),
        (("run", "--with", "margns"), "did you mean 'margins'?"),
        (("init", "--method", "fedpox"), "did you mean 'fedprox'?"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_one_that_was_meant(equipoise, arguments, hint):  # noqa: F811
    Path("here").mkdir()
    code, out, err = equipoise(*arguments)
    assert code == 2 and hint in err and out == "" and [path.name for path in Path().iterdir()] == ["here"]


def test_a_mistyped_name_is_answered_without_all_other_names(equipoise):  # noqa: F811
    for words in (("run", "--method", "fedagv"), ("run", "dem"), ("study", "phantom-al"), ("run", "--with", "margns")):
        code, _, err = equipoise(*words)
        assert code == 2 and "did you mean" in err and len(err) < 120
    code, _, err = equipoise("run", "--method", "zzz")
    assert code == 2 and all(name in err for name in method_names())


def test_an_error_in_a_plug_in_is_told_as_the_plug_ins_own(equipoise):  # noqa: F811
    assert equipoise("new", "loss", "mine")[0] == 0
    text = Path("mine.py").read_text()
    Path("mine.py").write_text(re.sub(r"(?m)^    return .*", "    return 1 / 0", text))
    code, _, err = equipoise("run", "--out", "run", *QUICK, "--set=train.loss='mine.py'")
    assert code == 2 and "division by zero: in the plug-in" in err and "mine.py, line" in err
    assert "fault of Equipoise" not in err


def test_a_runs_config_is_no_study_and_is_told_what_starts_it(equipoise):  # noqa: F811
    equipoise("init", "mine.toml", "--method", "prr")
    code, _, err = equipoise("study", "mine.toml")
    assert code == 2 and "equipoise run mine.toml" in err and len(err.splitlines()) == 1
    Path("grid.toml").write_text('name = "mine"\nseeds = [1, 2]\n[[row]]\nname = "fedavg"\n')
    code, _, err = equipoise("run", "grid.toml")
    assert code == 2 and "equipoise study grid.toml" in err and len(err.splitlines()) == 1


def commands(command: click.Command, name: str = "equipoise") -> dict[str, click.Command]:
    """Every command by the words that call it."""
    inner = getattr(command, "commands", {})
    return {name: command} | {k: v for key, c in inner.items() for k, v in commands(c, f"{name} {key}").items()}


@pytest.mark.parametrize(("words", "command"), commands(typer.main.get_command(app)).items())
def test_every_help_text_begins_with_an_example_of_the_command(words, command):
    example = (command.help or "").splitlines()[0]
    assert example.startswith(f"{EXAMPLE} {words}")


# ---- lists that are read without running --------------------------------------------------------------------------


@pytest.mark.parametrize("name", method_names())
def test_what_is_read_of_a_method_is_what_its_file_defines(name):
    path, method = modules_in("methods")[name], get_method(name)
    read = arguments(path, "METHOD", options=True)
    assert (read["paper"], read["year"], read["changes"]) == (method.paper, method.year, method.changes)
    assert summary(path) == method.summary and read.get("defaults", {}) == method.defaults
    assert list(modules_in("methods")) == method_names()
    fields = method.options.model_fields
    assert not fields or read["options"].model_json_schema() == method.options.model_json_schema()


def test_methods_and_runs_are_compared(equipoise):  # noqa: F811
    code, out, _ = equipoise("compare", "local", "fedavg", "--seeds", "1", "--out", "mine", *QUICK)
    assert code == 0 and "fedavg 1 " in out and "report: mine/report.html" in out
    code, out, _ = equipoise("compare", "mine/runs/local-seed1", "mine/runs/fedavg-seed1", "--out", "both.html")
    assert code == 0 and "both.html" in out and Path("both.html").exists()
