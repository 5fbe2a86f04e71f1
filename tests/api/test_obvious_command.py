"""The obvious command is the right one: `--method prr` is PRR, and as long as `--method fedavg`."""

from __future__ import annotations

from pathlib import Path

import pytest

import equipoise as eq
from equipoise.cli import hospitals
from equipoise.cli.app import app
from equipoise.components import component_names, get_component
from equipoise.contract.method import Setting
from equipoise.core.validation import validated
from equipoise.engine.opening import ineffective
from equipoise.engine.runs import make_config, refuse_idle_parts
from equipoise.hospitals.deployment_files import ServerFile
from equipoise.methods import get_method, method_names
from equipoise.studies.checks import refuse_idle_rows
from equipoise.studies.grid import cell_config, grid
from equipoise.studies.study_file import StudyConfig, load_study, study_names
from harness import events, tiny_config, tiny_federation


@pytest.mark.parametrize("method", method_names())
def test_by_default_every_method_is_itself_for_as_many_epochs_as_fedavg(method):
    config, plain = make_config(method=method), make_config(method="fedavg")
    refuse_idle_parts(config)
    rounds = get_method(method).defaults.get("train", {}).get("rounds", plain.train.rounds)  # a closed form needs one
    assert (config.train.epochs, config.train.rounds) == (plain.train.epochs, rounds)


def test_the_warm_up_follows_the_rounds_unless_it_is_given():
    def warmup(*settings: str, source: str | None = None) -> int:
        return make_config(source, settings, method="prr").methods["prr"]["warmup"]

    assert [warmup(f"train.rounds={rounds}") for rounds in (5, 20, 50, 200)] == [1, 6, 15, 15]
    assert warmup("prr.warmup=4") == 4 and warmup(source="prr-dermoscopy") == 15
    assert make_config(None, ["components=['cpa']"]).methods["cpa"]["warmup"] == 6
    assert get_component("cpa")().warmup == 15 and "cpa" in component_names()


def test_a_run_whose_distinctive_part_cannot_act_stops_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    fed = eq.load_federation("phantom", phantom={"images": 120, "sites": 2, "classes": 3, "size": 16})
    for start in (lambda: eq.train(fed, "prr", epochs=1, out="run"), lambda: eq.compare(fed, ["prr"], epochs=1)):
        with pytest.raises(eq.UserError, match=r"prr.det = 'ERS' could not act.*train.epochs to 3 or more.*--anyway"):
            start()
    assert not Path("run").exists() and not Path("studies").exists()
    settings = {"train.batch_size": 8, "augment.name": "flips"}
    result = eq.train(fed, "prr", epochs=1, rounds=1, out="run", settings=settings, anyway=True)
    assert result.finished and "prr.det" in " ".join(events(result.path, "start")[0]["warnings"])


@pytest.mark.parametrize(
    "words",
    [
        ["pilot", "--method=prr", "--epochs=1", "--out=run"],
        ["server", "server.toml", "--method=prr", "--epochs=1", "--out=run"],
        ["study", "mine.toml"],
        ["compare", "prr", "--epochs=1", "--out=run"],
        ["run", "--method=prr", "--epochs=1", "--out=run"],
    ],
)
def test_every_command_that_trains_stops_where_the_distinctive_part_is_idle(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'name = "mine"\n[settings.train]\nepochs = 1\n[[row]]\nname = "PRR"\nmethod = "prr"\n'
    Path("mine.toml").write_text(text)
    monkeypatch.setattr(hospitals, "_prepare", lambda: None)
    monkeypatch.setattr(ServerFile, "read", lambda path: None)
    with pytest.raises(eq.UserError, match=r"prr.det = 'ERS' could not act.*train.epochs to 3 or more.*--anyway"):
        app(words, standalone_mode=False)
    assert not Path("run").exists() and not Path("studies").exists()


def test_a_study_may_say_that_it_means_rows_whose_part_is_idle(tmp_path):
    row = {"name": "PRR", "method": "prr"}
    study = validated(StudyConfig, {"name": "mine", "settings": {"train": {"epochs": 1}}, "row": [row]}, "study")
    planned = [(cell, cell_config(study, cell)) for cell in grid(study, tmp_path)]
    with pytest.raises(eq.UserError, match=r"^PRR: prr.det"):
        refuse_idle_rows(planned)
    (planned[0][0].folder).mkdir(parents=True)
    (planned[0][0].folder / "events.jsonl").touch()
    refuse_idle_rows(planned)  # what has begun goes on


@pytest.mark.parametrize("name", study_names())
def test_built_in_studies_run_as_they_stand(name):
    study = load_study(name)
    if not study.anyway:
        first = {cell.row.name: cell for cell in grid(study, Path("none"), full=True)}
        refuse_idle_rows([(cell, cell_config(study, cell)) for cell in first.values()])


@pytest.mark.parametrize("preset", ["prr-dermoscopy", "prr-dermoscopy-grouped"])
def test_a_preset_leaves_a_method_its_loss(preset):
    assert make_config(preset, method="fednpr-per").train.loss == "balanced_softmax"
    assert make_config(preset, method="fedavg").train.loss == make_config(preset).train.loss == "ce"


@pytest.mark.parametrize(("loss", "told"), [("ce", True), ("balanced_softmax", False), ("focal", False)])
def test_plain_cross_entropy_in_place_of_a_methods_loss_is_told(loss, told):
    config = tiny_config("fednpr", f"train.loss={loss}")
    method = get_method("fednpr")
    setting = Setting.of(config, method, tiny_federation(config))
    assert (
        "replaces balanced_softmax, the loss of fednpr" in " ".join(ineffective(setting, method, ("a",), "global"))
    ) == told
