"""`equipoise study` under bad files, damaged runs, several processes and full disks."""

import json
import multiprocessing
import shutil
import sqlite3
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from PIL import Image

from equipoise.cli import app as cli
from equipoise.contract.config_files import override
from equipoise.engine.payload_files import claimed_folder
from equipoise.studies import database
from equipoise.studies.checks import is_finished
from equipoise.studies.grid import cell_config, grid
from equipoise.studies.runner import run_grid
from equipoise.studies.study_file import load_study
from harness import TINY as SMALL
from harness import events

ROWS = [{"name": name, "method": name} for name in ("fedavg", "local")]


def write_study(path: Path, **changes: Any) -> Path:
    """A study of two rows on the tiny phantom."""
    study = {"name": "small", "settings": override({}, SMALL), "row": ROWS} | changes
    path.write_text(tomli_w.dumps(study))
    return path


@pytest.fixture
def equipoise(monkeypatch, capsys, tmp_path):
    """Run the command line in this process, in an empty folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["equipoise", "study", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, " ".join(out.split()), " ".join(err.split())

    return call


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"method": "prr"}}, "'method' is no setting of a study"),
        ({"row": [ROWS[0] | {"settings": {"seed": 4}}]}, "'seed' is no setting of a study"),
        ({"data": [{"name": "a"}, {"name": "a"}]}, "two data sets are called a"),
        ({"row": [ROWS[0] | {"later": [2, 2]}]}, "later seeds of fedavg: 2 is named twice"),
        ({"row": [ROWS[0] | {"later": [1]}]}, "seeds and later seeds of fedavg: 1 is named twice"),
        ({"row": [ROWS[0] | {"later": [-2]}]}, "greater than or equal to 0"),
        ({"row": [ROWS[0], ROWS[0] | {"name": "FedAvg"}]}, "two rows are called fedavg and FedAvg"),
        ({"row": [ROWS[0] | {"name": "fedavg "}]}, "letters"),
        ({"seeds": [2**70]}, "less than 4294967296"),
        ({"seeds": [True]}, "valid integer"),
        ({"seeds": 1}, "seeds: expected a list (got 1)"),
        ({"row": ROWS[0]}, "expected a list of tables: [[row]]"),
        ({"metrics": ["ece", "ece"]}, "a metric is named twice"),
        ({"row": [{"name": "x" * 101, "method": "fedavg"}]}, "up to 100 letters"),
        ({"row": [ROWS[0] | {"settings": {"fedprox": {"mu": 1.0}}}]}, "options of fedprox have no effect"),
        ({"row": [ROWS[0] | {"view": "personal"}]}, "view = 'personal', but fedavg has only global models"),
        ({"row": [ROWS[0] | {"method": "fedmagic"}]}, "small.toml: row fedavg: there is no method 'fedmagic'"),
        ({"row": [ROWS[0] | {"tables": ["I", "I"]}]}, "row fedavg names a table twice"),
        ({"row": [ROWS[0] | {"tables": [""]}]}, "at least 1 character"),
        ({"row": [ROWS[0] | {"paper": {"ece": 160.0}}]}, "less than or equal to 100"),
        ({"settings": {"prr": {"tau": 2.0}}}, "settings of prr, but no row has this method"),
        ({"settings": {"data": {"name": "nosuch"}}}, "unknown data 'nosuch'"),
    ],
)
def test_a_mistake_in_the_file_is_told_and_nothing_is_written(equipoise, tmp_path, changes, message):
    code, _, err = equipoise(str(write_study(tmp_path / "small.toml", **changes)))
    assert code == 2 and message in err
    assert {path.name for path in tmp_path.iterdir()} == {"small.toml"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "seed=5"], "the seed of a run is its row's"),
        (["--set", "method=prr"], "the method of a run is its row's"),
        (["--set", "fedprox.mu=3"], "no row that is run has the method fedprox"),
        (["--report-only", "--only", "nix"], "--only has no effect"),
        (["--report-only", "--plan"], "--plan has no effect"),
        (["--limit-seconds", "nan"], "expected a number of seconds"),
        (["--seeds", "4294967296"], "seed: Input should be less than 4294967296"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(equipoise, tmp_path, options, message):
    code, _, err = equipoise(str(write_study(tmp_path / "small.toml")), *options)
    assert code == 2 and message in err


def test_a_preset_of_the_users_own_is_found_beside_the_study(equipoise, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "own.toml").write_text("[train]\nrounds = 2\n")
    study = write_study(tmp_path / "sub" / "small.toml", preset="own.toml", settings={}, row=ROWS[:1])
    code, out, err = equipoise(str(study), "--plan")
    assert code == 0, err
    assert "fedavg" in out and not (tmp_path / "studies").exists()


def test_the_plan_says_what_is_finished_and_runs_nothing(equipoise, tmp_path):
    study = str(write_study(tmp_path / "small.toml", seeds=[1, 2]))
    equipoise(study, "--only", "local", "--seeds", "2")
    code, out, _ = equipoise(study, "--plan")
    assert code == 0 and "fedavg fedavg 1, 2" in out and "local local 2 1" in out
    assert {path.name for path in Path("studies/small/runs").iterdir()} == {"local-seed2"}


def test_the_plan_names_what_is_kept_for_later(equipoise, tmp_path):
    rows = [ROWS[0] | {"later": [2, 3]}, ROWS[1] | {"seeds": [], "later": [1]}]
    study = str(write_study(tmp_path / "small.toml", row=rows))
    _, out, _ = equipoise(study, "--plan")
    assert "to run later" in out and "fedavg fedavg 1 2, 3 local local 1 finished" in out
    _, out, _ = equipoise(study, "--plan", "--only", "local")
    assert "local local 1 finished" in out
    _, out, _ = equipoise(study, "--plan", "--seeds", "7")
    assert "fedavg fedavg 7 local local 7 finished" in out
    _, out, _ = equipoise(study, "--plan", "--full")
    assert "fedavg fedavg 1, 2, 3 local local 1 finished" in out
    assert not Path("studies").exists()


@pytest.mark.parametrize("which", [(), ("--full",), ("--seeds", "7")])
def test_a_plan_takes_settings_of_methods_whatever_is_kept_for_later(which, equipoise, tmp_path):
    rows = [{"name": "prr", "method": "prr"}, ROWS[0] | {"later": [2]}]
    study = str(write_study(tmp_path / "small.toml", row=rows))
    code, out, err = equipoise(study, "--plan", *which, "--set", "prr.tau=2")
    assert code == 0 and "prr prr" in out, err
    code, _, err = equipoise(study, "--plan", *which, "--set", "fedbm.tau=2")
    assert code == 2 and "no row that is run has the method fedbm" in err


# ---- other processes -----------------------------------------------------------------------------------------------


def _study(source: str) -> None:
    sys.argv = ["equipoise", "study", source]
    cli.main()


def test_two_processes_on_one_study_leave_every_run_whole(equipoise, tmp_path):
    source = str(write_study(tmp_path / "small.toml", seeds=[1, 2]))
    spawn = multiprocessing.get_context("spawn")
    both = [spawn.Process(target=_study, args=(source,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert equipoise(source)[0] == 0
    runs = sorted(Path("studies/small/runs").iterdir())
    assert len(runs) == 4 and all(is_finished(run) and events(run, "final") for run in runs)
    summary = json.loads(Path("studies/small/summary.json").read_text())
    assert [row["macro_f1"]["n"] for row in summary["rows"]] == [2, 2]


def test_a_device_that_is_not_there_is_told_once_and_nothing_is_written(equipoise, tmp_path):
    code, _, err = equipoise(str(write_study(tmp_path / "small.toml")), "--device", "tpu")
    assert code == 2 and "compute.device = 'tpu' is no device" in err and "fedavg-seed1" not in err
    assert not Path("studies").exists()


def test_a_run_that_another_process_is_at_is_left_to_it(equipoise, tmp_path):
    source = str(write_study(tmp_path / "small.toml"))
    with claimed_folder(Path("studies/small/runs/fedavg-seed1")):
        code, out, _ = equipoise(source)
    assert code == 0 and "1 run is left to another process" in out
    assert is_finished(Path("studies/small/runs/local-seed1"))


def test_a_run_that_another_process_has_finished_meanwhile_counts_as_finished(tmp_path):
    study = load_study(str(write_study(tmp_path / "small.toml")))
    cells = [(cell, cell_config(study, cell)) for cell in grid(study, tmp_path / "small")]

    class Display:
        """Lets another process, as it were, run the second cell while the first one begins."""

        def started(self, cell, config):
            if cell is cells[0][0]:
                assert run_grid(cells[1:], Quiet()).finished == ["local-seed1"]
            return Quiet()

        def ended(self, cell, how): ...

    assert run_grid(cells, Display()).finished == ["fedavg-seed1", "local-seed1"]


class Quiet:
    """Shows nothing."""

    def started(self, cell, config):
        return self

    def ended(self, cell, how): ...

    def event(self, event, **fields): ...


def test_what_a_killed_process_left_of_a_finished_run_is_cleared_up(equipoise, tmp_path):
    source = str(write_study(tmp_path / "small.toml"))
    equipoise(source, "--keep-checkpoints")
    left = Path("studies/small/runs/local-seed1/checkpoints")
    assert left.is_dir()
    equipoise(source)
    assert not left.exists()


# ---- what lies on disk ---------------------------------------------------------------------------------------------


def damage(folder: Path, what: str) -> None:
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    match what:
        case "first line cut":
            log.write_text("".join(["{\n", *lines[1:]]))
        case "first line not UTF-8":
            log.write_bytes(b"\xff\xfe\n" + "".join(lines[1:]).encode())
        case "first line without config":
            log.write_text("".join(['{"event": "start"}\n', *lines[1:]]))
        case "a note that says nothing":
            (folder / "study.json").write_text("{}")
        case "a broken note":
            (folder / "study.json").write_bytes(b"\xff{")
        case "a line in the middle":
            log.write_text("".join([lines[0], "{\n", *lines[1:]]))
        case "no test results":
            log.write_text("".join(line for line in lines if '"event": "final"' not in line))
        case "a net that is not known":
            log.write_text("".join(lines).replace('"name": "small-cnn"', '"name": "foo"'))
        case "no rounds":
            log.write_text("".join(line for line in lines if '"event": "round"' not in line))


@pytest.mark.parametrize(
    "what",
    [
        "first line cut",
        "first line not UTF-8",
        "first line without config",
        "a note that says nothing",
        "a broken note",
        "a line in the middle",
        "no rounds",
        "no test results",
        "a net that is not known",
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_reported(equipoise, tmp_path, what):
    source = str(write_study(tmp_path / "small.toml"))
    equipoise(source)
    run = Path("studies/small/runs/fedavg-seed1")
    damage(run, what)
    Path("studies/small/table.csv").unlink()
    code, _, err = equipoise(source)
    assert code == 2 and "fedavg-seed1" in err and "delete the folder" in err
    table = Path("studies/small/table.csv").read_text()
    assert "local" in table and "fedavg" not in table
    summary = json.loads(Path("studies/small/summary.json").read_text())
    assert summary["damaged"] == ["fedavg-seed1"] and summary["not_run"] == []
    shutil.rmtree(run)
    assert equipoise(source)[0] == 0 and is_finished(run), "as the message says"


def test_a_finished_run_whose_last_line_is_lost_says_how_to_go_on(equipoise, tmp_path):
    source = str(write_study(tmp_path / "small.toml"))
    equipoise(source)
    log = Path("studies/small/runs/fedavg-seed1/events.jsonl")
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    for spoil in (lambda: None, log.unlink):
        spoil()
        for options in ([], ["--report-only"]):
            code, _, err = equipoise(source, *options)
            assert code == 2 and "events.jsonl is missing or damaged" in err and "delete the folder" in err
    shutil.rmtree(log.parent)
    assert equipoise(source)[0] == 0 and is_finished(log.parent), "as the message says"


@pytest.mark.parametrize("tail", ["garbage\n", "{", "\n\n"])
def test_a_finished_run_stays_finished_whatever_stands_after_its_end(equipoise, tmp_path, tail):
    source = str(write_study(tmp_path / "small.toml"))
    equipoise(source)
    log = Path("studies/small/runs/fedavg-seed1/events.jsonl")
    log.write_text(log.read_text() + tail)
    assert equipoise(source, "--report-only")[0] == 0 and is_finished(log.parent)
    assert "fedavg" in Path("studies/small/table.csv").read_text()


def test_a_report_names_the_runs_that_are_not_finished(equipoise, tmp_path):
    source = str(write_study(tmp_path / "small.toml"))
    equipoise(source)
    shutil.rmtree("studies/small/runs/local-seed1/models")
    log = Path("studies/small/runs/local-seed1/events.jsonl")
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    code, out, _ = equipoise(source, "--report-only")
    assert code == 0 and "1 run is not finished: local-seed1" in out


def test_a_full_disk_is_no_fault_of_the_program(equipoise, tmp_path, monkeypatch):
    source = str(write_study(tmp_path / "small.toml"))
    equipoise(source)

    def full(*_: Any) -> None:
        problem = sqlite3.OperationalError("database or disk is full")
        problem.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise problem

    monkeypatch.setattr(database, "_put", full)
    log = Path("studies/small/runs/fedavg-seed1/events.jsonl")
    log.write_text(log.read_text() + "\n")
    before = Path("studies/small/study.sqlite").read_bytes()
    code, _, err = equipoise(source, "--report-only")
    assert code == 2 and "study.sqlite could not be written: database or disk is full" in err
    assert Path("studies/small/study.sqlite").read_bytes() == before


# ---- images that change --------------------------------------------------------------------------------------------


def write_images(folder: Path, parts: tuple[str, ...] = ("train", "valid", "test")) -> Path:
    """A manifest of two sites and two classes."""
    folder.mkdir()
    lines = ["path,label,site,split"]
    for place, (part, site, label, copy) in enumerate(product(parts, "ab", ("dark", "light"), range(4))):
        shade = (40 if label == "dark" else 200) + place % 17 + copy
        Image.new("RGB", (16, 16), (shade, shade, shade)).save(folder / f"{place}.png")
        lines.append(f"{place}.png,{label},{site},{part}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return folder / "list.csv"


def on_images(path: Path, manifest: Path, **changes: Any) -> str:
    """A study of two rows on the images of a manifest, in the tiny setting."""
    settings = override({}, [text for text in SMALL if not text.startswith("data.")])
    data = {"name": f"manifest:{manifest}", "size": 16}
    return str(write_study(path, settings=settings | {"data": data}, **changes))


@pytest.mark.parametrize("change", ["fewer test images", "other pixels"])
@pytest.mark.parametrize("then", ["local-seed1", "fedavg-seed2", "central-seed1"])
def test_a_study_does_not_go_on_with_other_images(equipoise, tmp_path, monkeypatch, change, then):
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "stores"))
    manifest = write_images(tmp_path / "images")
    source = on_images(tmp_path / "small.toml", manifest, row=[*ROWS, {"name": "central", "method": "central"}])
    assert equipoise(source, "--only", "fedavg")[0] == 0
    if change == "other pixels":
        for path in manifest.parent.glob("*.png"):
            Image.new("RGB", (16, 16), (90, 20, 20)).save(path)
    else:
        manifest.write_text("\n".join(manifest.read_text().splitlines()[:-1]) + "\n")
    row, _, seed = then.partition("-seed")
    code, _, err = equipoise(source, "--only", row, "--seeds", seed)
    assert code == 2 and f"{then}: the data has changed since fedavg-seed1 ran" in err
    assert not Path(f"studies/small/runs/{then}/events.jsonl").exists()


def test_runs_of_other_seeds_and_pooled_ones_see_the_same_images(equipoise, tmp_path):
    rows = [*ROWS, {"name": "central", "method": "central"}]
    drawn = override({}, [*SMALL, "data.partition=dirichlet_per_class", "data.sites=3", "data.redraw=true"])
    source = str(write_study(tmp_path / "small.toml", row=rows, seeds=[1, 2], settings=drawn, scope="common"))
    code, out, _ = equipoise(source)
    assert code == 0 and "different images" not in out
    assert json.loads(Path("studies/small/summary.json").read_text())["incomparable"] == {}


def test_a_study_without_images_to_judge_by_is_refused_before_it_trains(equipoise, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "stores"))
    manifest = write_images(tmp_path / "images", ("train", "valid"))
    code, _, err = equipoise(on_images(tmp_path / "small.toml", manifest))
    assert code == 2 and "there are no test images" in err and 'part = "valid"' in err
    assert not list(Path("studies/small").rglob("events.jsonl"))
    assert equipoise(on_images(tmp_path / "small.toml", manifest, part="valid"))[0] == 0


def test_a_study_does_not_replace_tables_of_runs_elsewhere(equipoise, tmp_path):
    source = str(write_study(tmp_path / "small.toml"))
    equipoise(source)
    Path("studies/small/runs").rename("elsewhere")
    before = Path("studies/small/summary.json").read_text()
    code, _, err = equipoise(source)
    assert code == 2 and "holds tables of 2 runs that are not there" in err
    assert Path("studies/small/summary.json").read_text() == before and not Path("studies/small/runs").exists()


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_an_output_folder_that_cannot_be_made_is_one_message(equipoise, tmp_path, out):
    source = str(write_study(tmp_path / "small.toml"))
    Path("file").write_text("mine")
    code, _, err = equipoise(source, "--out", out)
    assert code == 2 and "Traceback" not in err and "file" in err


def test_a_folder_with_somebodys_files_is_left_alone(equipoise, tmp_path):
    source = str(write_study(tmp_path / "small.toml"))
    run = Path("studies/small/runs/fedavg-seed1")
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    code, _, err = equipoise(source)
    assert code == 2 and "fedavg-seed1" in err and "not empty and holds no run" in err
    assert [path.name for path in run.iterdir()] == ["notes.txt"] and is_finished(run.with_name("local-seed1"))


def test_markup_in_names_is_text(equipoise, tmp_path):
    source = write_study(tmp_path / "small.toml", row=[ROWS[0] | {"tables": ["[/x] one"]}], title="[bold")
    code, out, err = equipoise(str(source), "--out", "a[/b]")
    assert code == 0, err
    assert "[/x] one" in out and "a[/b]/small/report.html" in out


def test_a_study_of_a_common_set_is_refused_before_it_trains_on_data_without_one(equipoise, tmp_path):
    source = write_study(tmp_path / "small.toml", scope="common", row=[ROWS[0]])
    code, _, err = equipoise(str(source))
    assert code == 2 and "has no common test set" in err and "data.phantom.common = true" in err
    assert not Path("studies").exists()
    assert equipoise(str(source), "--plan")[0] == 0, "a plan needs no data"


def test_a_plan_tells_of_runs_begun_and_of_finished_ones_with_other_settings(equipoise, tmp_path):
    source = str(write_study(tmp_path / "small.toml", row=ROWS[:1]))
    assert equipoise(source)[0] == 0
    code, _, err = equipoise(source, "--plan", "--set", "train.epochs=2")
    assert code == 2 and "1 of the finished runs cannot be used" in err and "train.epochs = 1, now 2" in err
    events = Path("studies/small/runs/fedavg-seed1/events.jsonl")
    events.write_bytes(b"".join(events.read_bytes().splitlines(keepends=True)[:-1]))  # as if it had been stopped
    code, out, _ = equipoise(source, "--plan")
    assert code == 0 and "begun" in out and "fedavg" in out
