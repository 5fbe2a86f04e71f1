"""Trackers: what TensorBoard and MLflow are told of a run, over crashes and resumes, and that none can stop a run."""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cli import app as cli
from equipoise.contract.config_files import override
from equipoise.core.version import __version__
from equipoise.engine import tracking
from equipoise.engine.loop import Run
from equipoise.engine.tracking import Trackers, figures, plain_name
from equipoise.methods import get_method
from equipoise.studies.tracked import TrackedGrid
from harness import TINY, all_state, assert_same_bits, events, run_tiny, tiny_config, tiny_federation

QUICK = [f"--set={setting}" for setting in TINY]


@pytest.fixture
def equipoise(monkeypatch, capsys, tmp_path):
    """Run the command line in this process, in an empty folder; gives exit code and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["equipoise", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, " ".join(capsys.readouterr().err.split())

    return call


class Stop:
    """An observer that ends a run in the middle of a round, after its training was told and before it is saved."""

    def __init__(self, problem: type[BaseException], number: int = 2):
        self.problem = problem
        self.number = number

    def event(self, event: str, **fields: Any) -> None:
        if event == "round" and fields["round"] == self.number:
            raise self.problem


def tracked(folder: Path, *names: str, resume: bool = False, stop: type[BaseException] | None = None) -> Path:
    """A tiny run under trackers, to its end or to where it is stopped."""
    config = tiny_config("fedavg")
    with Trackers(names, folder) as trackers:
        watchers = [trackers, *([Stop(stop)] if stop else [])]
        Run(config, get_method("fedavg"), tiny_federation(config), folder, watchers).execute(resume)
    return folder


def told(folder: Path) -> dict[tuple[str, int], float]:
    """The figures that a finished run's events hold, by name and round."""
    last = max(event["round"] for event in events(folder, "round"))
    return {
        (name, tracking.step_of(event["event"], event, last)): value
        for event in events(folder)
        for name, value in figures(event["event"], event).items()
    }


# ---- figures -------------------------------------------------------------------------------------------------------


def test_a_round_is_told_by_site_and_in_sum():
    facts = {
        "a": {"sent": 10, "received": 20, "seconds": 0.5, "loss": 1.5, "examples": 4, "steps": 1},
        "b/c": {"sent": 1, "received": 2, "seconds": 0.25},
    }
    numbers = figures("round", {"round": 3, "seconds": 0.75, "lr": 0.1, "sites": facts, "missing": {"d": "lost"}})
    assert (
        numbers.items()
        >= {
            "round/seconds": 0.75,
            "round/lr": 0.1,
            "round/missing": 1,
            "round/sent": 11,
            "round/received": 22,
            "train/a/loss": 1.5,
            "train/a/seconds": 0.5,
            f"train/{plain_name('b/c')}/sent": 1,
        }.items()
    )


def test_scores_are_told_by_part_view_and_site_and_unknown_ones_left_out():
    score = {"round": 3, "part": "valid", "view": "personal", "site": "a", "metrics": {"accuracy": 0.5, "ece": None}}
    assert figures("evaluation", score) == {"valid/personal/a/accuracy": 0.5}
    mean = {"view": "global", "scope": "mean", "site": None, "metrics": {"accuracy": 0.5}, "extra": {"spread": 0.1}}
    assert figures("final", mean) == {"final/global/mean/accuracy": 0.5, "final/global/mean/spread": 0.1}
    assert figures("final", mean | {"scope": "site", "site": "mean"}).keys() >= {"final/global/site/mean/accuracy"}
    assert figures("warning", {"text": "nothing to count"}) == {}


@given(st.lists(st.text(max_size=150), min_size=2, max_size=4, unique=True))
def test_any_name_of_a_site_becomes_one_of_its_own_that_mlflow_takes(names):
    plain = [plain_name(name) for name in names]
    assert len(set(plain)) == len(names)
    for name in plain:
        metric = f"valid/personal/{name}/balanced_accuracy"
        assert re.fullmatch(r"[/\w.\- ]*", metric) and posixpath.normpath(metric) == metric and len(metric) < 250


def test_plain_names_stay_as_they_are():
    assert [plain_name(name) for name in ("site 1", "St. Anna-2", "Köln_3")] == ["site 1", "St. Anna-2", "Köln_3"]


# ---- what may go wrong ---------------------------------------------------------------------------------------------


def study_file(path: Path) -> str:
    """A study of two methods on the tiny phantom."""
    rows = [{"name": name, "method": name} for name in ("fedavg", "local")]
    path.write_text(tomli_w.dumps({"name": "small", "settings": override({}, TINY), "row": rows}))
    return str(path)


@pytest.mark.parametrize("name", tracking.PACKAGES)
@pytest.mark.parametrize("command", ["run", "study"])
def test_without_its_package_a_tracker_is_refused_before_anything_is_written(equipoise, monkeypatch, name, command):
    monkeypatch.setitem(sys.modules, tracking.PACKAGES[name], None)
    arguments = ["--set=train.rounds=1"] if command == "run" else [study_file(Path("small.toml"))]
    before = sorted(Path().iterdir())
    code, err = equipoise(command, *arguments, "--track", name)
    assert code == 2 and f"--track {name} needs" in err and "install the extra track: pip install" in err
    assert sorted(Path().iterdir()) == before


def test_an_unknown_tracker_is_refused(equipoise):
    code, err = equipoise("run", "--track", "paper", "--out", "one")
    assert code == 2 and "choose one of tensorboard, mlflow" in err and not Path("one").exists()


def test_a_study_that_runs_nothing_refuses_a_tracker(equipoise):
    code, err = equipoise("study", study_file(Path("small.toml")), "--report-only", "--track", "mlflow")
    assert code == 2 and "--track has no effect" in err


class Breaking:
    """A store that breaks when the second round is told."""

    def __init__(self, folder: Path):
        self.folder = folder

    def begin(self, start: Any) -> None: ...

    def log(self, numbers: Any, step: int) -> None:
        if step == 2:
            raise ConnectionError(f"server of {self.folder.name} away\nwith more lines")

    def close(self, status: str, report: Path | None) -> None:
        raise AssertionError("told after it broke")


def test_a_tracker_that_breaks_is_named_once_and_the_run_goes_on(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tracking, "WRITERS", {"mlflow": Breaking})
    tracked(tmp_path / "one", "mlflow")
    assert capsys.readouterr().err == "warning: mlflow failed, and the run goes on without it: server of one away\n"
    assert_same_bits(all_state(tmp_path / "one"), all_state(run_tiny(tmp_path / "untracked")))


def test_a_study_gives_up_a_tracker_that_broke(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tracking, "WRITERS", {"mlflow": Breaking})
    seen: list[str] = []
    watcher = SimpleNamespace(event=lambda event, **fields: seen.append(event))
    display = SimpleNamespace(started=lambda cell, config: watcher, ended=lambda cell, how: seen.append(how))
    with TrackedGrid(display, ["mlflow"]) as grid:
        for name in ("one", "two"):
            cell: Any = SimpleNamespace(label=name, folder=tmp_path / name)
            observer = grid.started(cell, tiny_config())
            observer.event("start")
            observer.event("round", round=2, seconds=1.0, lr=0.1, sites={}, missing={})
            grid.ended(cell, "finished")
    assert seen == ["start", "round", "finished"] * 2
    assert capsys.readouterr().err.count("failed") == 1


# ---- TensorBoard ---------------------------------------------------------------------------------------------------


@pytest.fixture
def board():
    """Reads TensorBoard's files of a run; gives its figures by name and round, each as often as it shows."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder: Path) -> list[tuple[tuple[str, int], float]]:
        shown = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
        shown.Reload()
        return [((name, e.step), e.value) for name in shown.Tags()["scalars"] for e in shown.Scalars(name)]

    return read


def test_tensorboard_shows_what_the_events_say(board, equipoise, tmp_path):
    code, err = equipoise("run", "--out", "one", "--track", "tensorboard", "--track", "tensorboard", *QUICK)
    assert (code, err) == (0, "")
    shown = board(tmp_path / "one")
    assert dict(shown) == pytest.approx(told(tmp_path / "one")) and len(shown) == len(dict(shown))
    assert {"train/site 1/loss", "valid/global/site 1/macro_f1", "final/global/mean/macro_f1"} <= {
        n for (n, _), _ in shown
    }


def test_tensorboard_shows_a_repeated_round_once(board, tmp_path):
    with pytest.raises(RuntimeError):
        tracked(tmp_path / "one", "tensorboard", stop=RuntimeError)
    assert ("round/seconds", 2) in dict(board(tmp_path / "one"))
    tracked(tmp_path / "one", "tensorboard", resume=True)
    shown = board(tmp_path / "one")
    assert dict(shown) == pytest.approx(told(tmp_path / "one")) and len(shown) == len(dict(shown))


def test_trackers_change_no_bit_of_a_run(board, tmp_path):
    assert_same_bits(all_state(tracked(tmp_path / "one", "tensorboard")), all_state(run_tiny(tmp_path / "two")))


# ---- MLflow --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> str:
    """A database of MLflow for all tests: to make one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def client(database, monkeypatch, request, tmp_path):
    """MLflow's client; runs go to an experiment of the test's own."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", request.node.name)
    mlflow.MlflowClient().create_experiment(request.node.name, artifact_location=(tmp_path / "artifacts").as_uri())
    return mlflow.MlflowClient()


def all_runs(client: Any) -> list[Any]:
    """The runs of the test's experiment."""
    experiment = client.get_experiment_by_name(os.environ["MLFLOW_EXPERIMENT_NAME"])
    return client.search_runs([experiment.experiment_id])


def history(client: Any, run: Any) -> list[tuple[tuple[str, int], float]]:
    """All figures of a run of MLflow, by name and step."""
    names = run.data.metrics
    return [((name, m.step), m.value) for name in names for m in client.get_metric_history(run.info.run_id, name)]


def test_mlflow_gets_settings_figures_tags_and_report(client, equipoise):
    code, _ = equipoise("run", "--method", "fedprox", "--out", "one", "--track", "mlflow", *QUICK)
    (run,) = all_runs(client)
    assert code == 0 and run.info.status == "FINISHED"
    assert run.info.run_id == json.loads(Path("one/mlflow.json").read_text())["run_id"]
    start = events(Path("one"), "start")[0]
    assert run.info.run_name == start["run"]
    assert run.data.tags.items() >= {"method": "fedprox", "version": __version__}.items()
    assert run.data.params["train.rounds"] == "2"
    assert run.data.params["methods.fedprox.mu"] == str(start["config"]["methods"]["fedprox"]["mu"])
    shown = history(client, run)
    assert dict(shown) == pytest.approx(told(Path("one"))) and len(shown) == len(dict(shown))
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.html"]


@pytest.mark.parametrize(("problem", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(client, tmp_path, problem, status):
    with pytest.raises(problem):
        tracked(tmp_path / "one", "mlflow", stop=problem)
    assert [run.info.status for run in all_runs(client)] == [status]
    tracked(tmp_path / "one", "mlflow", resume=True)
    (run,) = all_runs(client)
    assert run.info.status == "FINISHED"
    shown = history(client, run)
    assert {key for key, _ in shown} == told(tmp_path / "one").keys()
    assert [key for key, _ in shown].count(("round/seconds", 1)) == 1
    assert [key for key, _ in shown].count(("round/seconds", 2)) == 2


def test_a_tracker_that_joins_at_a_resume_learns_what_happened_before(client, tmp_path):
    with pytest.raises(RuntimeError):
        tracked(tmp_path / "one", stop=RuntimeError)
    tracked(tmp_path / "one", "mlflow", resume=True)
    (run,) = all_runs(client)
    assert dict(history(client, run)) == pytest.approx(told(tmp_path / "one"))
    assert run.data.params["train.rounds"] == "2"


def test_a_run_that_was_deleted_from_mlflow_gets_a_new_one(client, tmp_path):
    with pytest.raises(RuntimeError):
        tracked(tmp_path / "one", "mlflow", stop=RuntimeError)
    client.delete_run(all_runs(client)[0].info.run_id)
    tracked(tmp_path / "one", "mlflow", resume=True)
    (run,) = all_runs(client)
    assert run.info.status == "FINISHED" and dict(history(client, run)) == pytest.approx(told(tmp_path / "one"))


def test_a_server_that_is_away_does_not_stop_a_run(client, equipoise, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    code, err = equipoise("run", "--out", "one", "--track", "mlflow", *QUICK)
    assert code == 0 and err.count("warning: mlflow failed, and the run goes on without it") == 1
    assert Path("one/report.html").is_file()


def test_mlflow_tells_sites_apart_whatever_they_are_called(client, tmp_path):
    sites = ["a/b", "a:b", "..", "ä b", "x" * 300, "100 %", "[red]"]
    with Trackers(["mlflow"], tmp_path) as trackers:
        trackers.event("start", run="odd", method="fedavg", version="0", config={"data": {"root": "a/b"}})
        for loss, site in enumerate(sites):
            facts = {site: {"sent": 1, "received": 1, "loss": loss}}
            trackers.event("round", round=1, seconds=1.0, lr=0.1, sites=facts, missing={})
    (run,) = all_runs(client)
    assert run.info.status == "FINISHED"
    losses = {name: value for name, value in run.data.metrics.items() if name.endswith("/loss")}
    assert losses == {f"train/{plain_name(site)}/loss": loss for loss, site in enumerate(sites)}


def test_runs_of_a_study_that_take_turns_are_told_apart(client, equipoise, tmp_path):
    code, err = equipoise("study", study_file(Path("small.toml")), "--together", "2", "--track", "mlflow")
    runs = {run.data.tags["method"]: run for run in all_runs(client)}
    assert code == 0 and runs.keys() == {"fedavg", "local"}, err
    for method, run in runs.items():
        folder = tmp_path / "studies/small/runs" / f"{method}-seed1"
        assert run.info.status == "FINISHED" and dict(history(client, run)) == pytest.approx(told(folder))
