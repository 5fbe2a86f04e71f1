"""Studies: the same bits however runs share a process or are interrupted, and tables that say what the events say."""

import csv
import io
import json
import re
import shutil
import sqlite3
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from browsing import drawn_figures, opened
from equipoise.cli.study_tables import print_tables
from equipoise.contract.config import Config
from equipoise.core.errors import UserError
from equipoise.engine.events import first_event
from equipoise.engine.runs import prepare_run
from equipoise.methods import all_options, method_names
from equipoise.report.record import read_run
from equipoise.statistics import compare_with_best, ranking, spread
from equipoise.studies import database, load_study, study_names
from equipoise.studies import runner as runner_module
from equipoise.studies.archive import unpack
from equipoise.studies.checks import is_finished
from equipoise.studies.grid import as_settings, cell_config, deviations, grid, known_cells, listed
from equipoise.studies.results import collect
from equipoise.studies.row_cost import net_cost
from equipoise.studies.runner import run_grid
from equipoise.studies.score_tables import tables_of
from equipoise.studies.study_figures import curve_view
from equipoise.studies.study_file import StudyConfig
from equipoise.studies.study_files import summary, to_csv, to_latex, to_markdown, write_study
from equipoise.studies.study_page import render
from harness import all_state, assert_same_bits, events

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "name": "tiny",
    "settings": {
        "train": {"rounds": 3, "batch_size": 8},
        "data": {"phantom": {"images": 90, "sites": 2, "classes": 3, "size": 16}},
        "augment": {"name": "flips"},
        "net": {"dropout": 0.5},
        "compute": {"device": "cpu"},
    },
    "row": [{"name": "fedavg", "method": "fedavg"}, {"name": "local", "method": "local"}],
}


def tiny_study(**changes: Any) -> StudyConfig:
    return StudyConfig.model_validate(TINY | changes)


def planned(study: StudyConfig, folder: Path, **choice: Any) -> list[Any]:
    return [(cell, cell_config(study, cell)) for cell in grid(study, folder, **choice)]


class Silent:
    """A display that shows nothing; an observer may be given for every run."""

    def __init__(self, observer: Any = None):
        self.observer = observer
        self.endings: dict[str, str] = {}

    def started(self, cell, config):
        return self

    def ended(self, cell, how):
        self.endings[cell.label] = how

    def event(self, event, **fields):
        if self.observer:
            self.observer(event, fields)


# ---- running -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The tiny study's runs, each alone and without a study around it."""
    folder = tmp_path_factory.mktemp("straight")
    for cell, config in planned(tiny_study(), folder):
        prepare_run(config, cell.folder).execute()
    return folder


def assert_same_runs(first: Path, second: Path) -> None:
    for name in ("fedavg-seed1", "local-seed1"):
        one, other = first / "runs" / name, second / "runs" / name
        assert_same_bits(all_state(one), all_state(other))
        assert events(one, "evaluation") == events(other, "evaluation")
        assert events(one, "final") == events(other, "final")


def test_runs_that_share_a_process_have_the_bits_of_runs_alone(straight, tmp_path):
    outcome = run_grid(planned(tiny_study(), tmp_path), Silent(), together=2, keep=True)
    assert sorted(outcome.finished) == ["fedavg-seed1", "local-seed1"]
    assert_same_runs(straight, tmp_path)


def test_a_killed_study_goes_on_with_the_same_bits(straight, tmp_path):
    class Killed(BaseException):
        pass

    def kill(event, fields):
        if event == "round" and fields["round"] == 2:
            raise Killed

    with pytest.raises(Killed):
        run_grid(planned(tiny_study(), tmp_path), Silent(kill), together=2, keep=True)
    with (tmp_path / "runs" / "fedavg-seed1" / "events.jsonl").open("a") as file:
        file.write('{"event": "evalu')  # what kill -9 leaves of a line
    assert not is_finished(tmp_path / "runs" / "fedavg-seed1")
    run_grid(planned(tiny_study(), tmp_path), Silent(), keep=True)
    assert [e["round"] for e in events(tmp_path / "runs" / "fedavg-seed1", "resumed")] == [1]
    assert_same_runs(straight, tmp_path)


def test_a_limit_stops_runs_after_a_saved_round_and_the_next_call_goes_on(straight, tmp_path, monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(runner_module.time, "monotonic", lambda: clock["now"])

    def tick(event, fields):
        clock["now"] += 10 if event == "round" else 0

    cells = planned(tiny_study(settings=TINY["settings"] | {"checkpoint": {"every": 50}}), tmp_path)
    first = run_grid(cells, Silent(tick), limit_seconds=25, keep=True)
    assert first.stopped == ["fedavg-seed1", "local-seed1"] and not first.finished
    assert (tmp_path / "runs" / "fedavg-seed1" / "checkpoints" / "round-00002").is_dir()
    assert not (tmp_path / "runs" / "local-seed1").exists(), "nothing new is begun when the time is up"
    second = run_grid(cells, Silent(), keep=True)
    assert sorted(second.finished) == ["fedavg-seed1", "local-seed1"]
    assert_same_runs(straight, tmp_path)


def test_finished_runs_are_left_alone_and_refused_under_other_settings(tmp_path):
    study = tiny_study(row=[TINY["row"][0]])
    run_grid(planned(study, tmp_path), Silent())
    folder = tmp_path / "runs" / "fedavg-seed1"
    assert not (folder / "checkpoints").exists() and (folder / "models").exists()
    before = (folder / "events.jsonl").stat().st_mtime_ns
    run_grid(planned(study, tmp_path), Silent())
    assert (folder / "events.jsonl").stat().st_mtime_ns == before
    other = tiny_study(row=[TINY["row"][0] | {"settings": {"train": {"epochs": 2}}}])
    with pytest.raises(UserError, match=r"train\.epochs = 3, now 2"):
        run_grid(planned(other, tmp_path), Silent())


def test_one_failing_run_leaves_the_others_their_turn(tmp_path):
    rows = [{"name": "bad", "method": "fedavg", "settings": {"train": {"min_sites": 9}}}, TINY["row"][1]]
    display = Silent()
    outcome = run_grid(planned(tiny_study(row=rows), tmp_path), display)
    assert outcome.finished == ["local-seed1"] and "min_sites" in display.endings["bad-seed1"]
    with pytest.raises(UserError, match=r"bad-seed1: train\.min_sites = 9"):
        outcome.complain()


def test_sharing_refuses_runs_that_compute_differently(tmp_path):
    rows = [TINY["row"][0], TINY["row"][1] | {"settings": {"compute": {"threads": 2}}}]
    with pytest.raises(UserError, match="same compute settings"):
        run_grid(planned(tiny_study(row=rows), tmp_path), Silent(), together=2)


# ---- study files -----------------------------------------------------------------------------------------------------


def test_grid_fills_first_seeds_before_second_ones_and_keeps_later_ones_for_the_full_grid(tmp_path):
    rows = [
        {"name": "a", "method": "fedavg", "seeds": [1, 2], "later": [3]},
        {"name": "b", "method": "fedavg"},
        {"name": "c", "method": "fedavg", "seeds": [], "later": [1]},
    ]
    study = tiny_study(row=rows, seeds=[7])
    assert [cell.label for cell in grid(study, tmp_path)] == ["a-seed1", "b-seed7", "a-seed2"]
    full = [cell.label for cell in grid(study, tmp_path, full=True)]
    assert full == ["a-seed1", "b-seed7", "c-seed1", "a-seed2", "a-seed3"]
    assert [cell.label for cell in grid(study, tmp_path, only=["c"], seeds=[4])] == ["c-seed4"]
    with pytest.raises(UserError, match="no row 'd'; rows: 'a', 'b', 'c'"):
        grid(study, tmp_path, only=["d"])


def test_settings_of_command_line_row_data_set_and_study_override_each_other_in_this_order(tmp_path):
    study = tiny_study(
        settings={"train": {"rounds": 9, "epochs": 9, "batch_size": 9}},
        data=[{"name": "small", "settings": {"train": {"epochs": 8, "batch_size": 8}}}],
        row=[{"name": "a", "method": "fedprox", "settings": {"train": {"batch_size": 7}, "fedprox": {"mu": 0.5}}}],
    )
    (cell,) = grid(study, tmp_path)
    config = cell_config(study, cell, ["train.rounds=3"])
    assert (config.train.rounds, config.train.epochs, config.train.batch_size) == (3, 8, 7)
    assert config.methods["fedprox"]["mu"] == 0.5 and config.method == "fedprox"
    assert cell.folder == tmp_path / "runs" / "small" / "a-seed1"


@pytest.mark.parametrize(
    ("method", "settings", "given", "view"),
    [
        ("fedavg", {}, [], "global"),
        ("fedavg", {}, ["evaluation.view=personal"], "personal"),
        ("prr", {}, [], "auto"),
        ("prr", {"prr": {"global_view": True}}, [], "global"),
        ("prr", {}, ["prr.global_view=true"], "global"),
        ("fednpr", {}, [], "global"),
        ("fednpr", {"npr": {"supervised": False}}, [], "auto"),
    ],
)
def test_on_a_common_set_the_global_model_is_chosen_by_where_the_rows_settings_give_it_one(
    tmp_path, method, settings, given, view
):
    study = tiny_study(scope="common", row=[{"name": "a", "method": method, "settings": settings}])
    (cell,) = grid(study, tmp_path)
    assert cell_config(study, cell, given).evaluation.view == view


@given(
    st.recursive(
        st.one_of(st.integers(-5, 5), st.booleans(), st.text(max_size=5), st.lists(st.integers(), max_size=3)),
        lambda values: st.dictionaries(st.from_regex(r"\A[a-z]{1,4}\Z"), values, min_size=1, max_size=3),
        max_leaves=6,
    ).filter(lambda value: isinstance(value, dict))
)
def test_nested_tables_survive_as_settings(table):
    from equipoise.contract.config_files import override

    assert override({}, list(as_settings(table))) == table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "colour: unknown key"),
        ({"row": [{"name": "a", "method": "fedavg"}] * 2}, "two rows are called a"),
        ({"row": []}, "needs rows"),
        ({"seeds": [1, 2, 1]}, "seeds of the study: 1 is named twice"),
        ({"row": [{"name": "a", "method": "fedavg", "seeds": [1, 1]}]}, "seeds of a: 1 is named twice"),
        ({"row": [{"name": "a/b", "method": "fedavg"}]}, "row.1.name"),
        ({"metrics": ["f1"]}, "metrics.1"),
        ({"part": "train"}, "part"),
        (
            {"part": "valid", "row": [{"name": "a", "method": "fedavg", "paper": {"macro_f1": 60.0}}]},
            "paper numbers are test scores",
        ),
    ],
)
def test_a_faulty_study_file_is_told_by_place(tmp_path, change, message):
    import tomli_w

    path = tmp_path / "study.toml"
    path.write_text(tomli_w.dumps(TINY | change))
    with pytest.raises(UserError, match=re.escape(message)):
        load_study(str(path))


@pytest.mark.parametrize("name", study_names())
def test_shipped_studies_are_valid_row_by_row(name, tmp_path):
    study = load_study(name)
    assert study.name == name and study.title
    runs: dict[tuple[str, str | None], list[str]] = {}
    for cell in grid(study, tmp_path, full=True):
        config = cell_config(study, cell)
        assert not deviations(config, config.model_dump(mode="json"))
        runs.setdefault((config.digest(), cell.row.view), []).append(cell.label)  # two models of one run are two rows
    assert not [labels for labels in runs.values() if len(labels) > 1], "the same run under two names"
    unreached = {row.name for row in study.rows} - {cell.row.name for cell in grid(study, tmp_path, full=True)}
    assert not unreached


def test_the_papers_first_wave_is_what_was_agreed():
    rows = {row.name: row for row in load_study("prr-dermoscopy").rows}
    parts = ["", "+pfa", "+det", "+cpa_global", "+cpa_local", "+cpa"]
    table4 = [f"fedbn{part}" for part in parts] + ["prr-det", "prr-pfa", "prr-cpa", "prr"]
    assert [name for name, row in rows.items() if "Table IV" in row.tables] == table4
    assert all(rows[name].seeds == (1, 2, 3) for name in ("fedavg", "fedbn", "fml", "prr"))
    assert rows["prr"].paper == {"macro_f1": 72.82, "balanced_auc": 89.20}


def with_all_options(recorded: dict[str, Any]) -> Config:
    """A recorded config, with the options that runs did not write down at first: those at their defaults."""
    options = all_options(recorded["method"], recorded["methods"].get(recorded["method"], {}))
    methods = recorded["methods"] | ({recorded["method"]: options} if options else {})
    return Config.model_validate(recorded | {"methods": methods})


def test_recorded_runs_are_those_that_their_study_plans():
    study, folder = load_study("prr-dermoscopy"), ROOT / "results" / "prr-dermoscopy"
    unpack(folder)
    recorded = {cell.label: (cell, first_event(cell.folder / "events.jsonl")) for cell in known_cells(study, folder)}
    assert {"fedavg-seed1", "fedbn-seed1", "prr-seed1"} <= recorded.keys()
    for cell, start in recorded.values():
        config = cell_config(study, cell, [f"compute.device={start['config']['compute']['device']}"])
        assert config.digest() == with_all_options(start["config"]).digest()


def test_fedbabu_is_scored_after_fine_tuning_of_the_head_and_chosen_by_the_averaged_model(tmp_path):
    study = load_study("fednpr-isic")
    cells = [cell for cell in grid(study, tmp_path, full=True, seeds=[1]) if cell.row.method == "fedbabu"]
    weights = {}
    for cell in cells:
        config = cell_config(study, cell)
        assert cell.row.view == "personal" and config.evaluation.view == "global"
        assert config.methods["fedbabu"].items() >= {"finetuned": "head", "finetune_lr": 1e-3}.items()
        weights[cell.row.name] = config.npr.weight
    assert weights == {"fedbabu": 0.0, "fedbabu+npr": 0.1}


def test_the_study_over_all_methods_has_every_registered_one():
    assert [row.name for row in load_study("phantom-all").rows] == method_names()


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_spread_is_mean_and_sample_deviation_of_what_is_known():
    found = spread([1.0, None, 2.0, 6.0])
    assert found is not None
    assert (found.mean, found.n) == (3.0, 3) and found.std == pytest.approx(np.sqrt(7))
    assert spread([4.0]).std is None and spread([None]) is None


def test_comparisons_pair_by_seed_and_correct_over_rows():
    values = {
        "best": {1: 70.0, 2: 72.0, 3: 71.0, 4: 73.0},
        "near": {3: 70.5, 1: 69.0, 2: 71.0, 4: 72.5},
        "far": {1: 50.0, 2: 54.0, 3: 49.0, 4: 55.0},
        "short": {1: 99.0, 2: 99.0},
    }
    found = {comparison.other: comparison for comparison in compare_with_best(values)}
    assert set(found) == {"near", "far"} and {c.best for c in found.values()} == {"best"}
    raw = {name: stats.ttest_rel([70, 72, 71, 73], [values[name][s] for s in (1, 2, 3, 4)]).pvalue for name in found}
    assert found["near"].t_test == pytest.approx(raw["near"]) and found["near"].difference == pytest.approx(0.75)
    smaller, larger = sorted(raw, key=lambda name: raw[name])
    assert found[smaller].t_test_holm == pytest.approx(min(2 * raw[smaller], 1))
    assert found[larger].t_test_holm == pytest.approx(max(2 * raw[smaller], raw[larger]))
    assert found["far"].wilcoxon == pytest.approx(0.125)


def test_the_best_is_that_of_the_seeds_that_all_have():
    long = {1: 80.0, 2: 82.0, 3: 84.0, 4: 60.0, 5: 61.0, 6: 62.0}
    short = {1: 78.0, 2: 79.0, 3: 80.0}
    (found,) = compare_with_best({"long": long, "short": short})
    assert found.best == "long" and found.pairs == 3 and found.difference == pytest.approx(3.0)


def test_the_lowest_is_best_for_errors():
    values = {"calm": {1: 2.0, 2: 2.5, 3: 2.2}, "wild": {1: 9.0, 2: 8.0, 3: 9.5}}
    assert compare_with_best(values, higher=False)[0].best == "calm"


@given(st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=1, max_size=6))
def test_ranks_of_each_block_add_up_and_the_best_is_first(table):
    values = {f"row{place}": dict(enumerate(row)) for place, row in enumerate(table)}
    found = ranking(values).ranks
    for block in range(3):
        column = {name: own[block] for name, own in found.items()}
        assert sum(column.values()) == pytest.approx(len(table) * (len(table) + 1) / 2)
        best = max(values, key=lambda name: values[name][block])
        assert column[best] == min(column.values())


def test_scores_that_differ_by_rounding_share_a_rank():
    score = 100 * 0.4883720930232558
    means = [spread([score] * seeds).mean for seeds in (2, 3)]
    assert means[0] != means[1], "the case is worth nothing else"
    found = ranking({"a": {"x": means[0]}, "b": {"x": means[1]}, "c": {"x": 1.0}})
    assert found.means == {"a": 1.5, "b": 1.5, "c": 3.0}


def test_ranks_leave_out_rows_that_lack_a_block_and_name_it():
    found = ranking({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0}, "c": {"x": 2.0, "y": 0.0}})
    assert found.ranks == {"a": {"x": 2.0, "y": 1.0}, "c": {"x": 1.0, "y": 2.0}}
    assert found.lacking == {"b": ["y"]} and found.means == {"a": 1.5, "c": 1.5}


def test_the_slim_vgg_costs_what_the_paper_says():
    config = {"augment": {"size": None}, "net": {"name": "vgg16-slim"}}
    cost = net_cost({"config": config, "image_size": 128, "channels": 3, "classes": ["nv", "bkl", "mel"]})
    assert cost is not None
    assert cost.flops == pytest.approx(1.96e9, rel=0.01)
    assert cost.model_bytes / 2**20 == pytest.approx(9.10, rel=0.01)


# ---- tables and report, on made-up runs ------------------------------------------------------------------------------

CLASSES = ["nevus", "melanoma", "vascular"]
SITES = ("Vienna", "Sydney")
SCORES = {"fedavg": {1: 50.0, 2: 52.0, 3: 54.0}, "prr": {1: 70.0, 2: 73.0, 3: 73.0}, "local": {1: 40.0}}
VIEWS = {"fedavg": ("global",), "prr": ("global", "personal"), "local": ("personal",)}
PAPER = {"prr": {"macro_f1": 72.82}}


def made_up_study(**changes: Any) -> StudyConfig:
    rows = [
        {"name": name, "method": name, "seeds": list(SCORES[name]), "paper": PAPER.get(name, {})} for name in SCORES
    ]
    rows[1]["paper_cohort"] = {"macro_f1": 50.24}
    rows.append({"name": "central", "method": "central", "note": "for later"})
    facts = {"name": "made-up", "title": "Made-up scores", "paper": "Table II", "row": rows, "differs": ["64 px."]}
    return StudyConfig.model_validate(facts | {"metrics": ["macro_f1", "ece"]} | changes)


def made_up_events(study: StudyConfig, cell: Any, view_gain: float = -5.0) -> list[dict[str, Any]]:
    """A finished run whose mean macro F1 is that of SCORES (global models 5 points lower where there are two views)."""
    name, seed = cell.row.name, cell.seed
    value = SCORES[name][seed] / 100
    config = cell_config(study, cell).model_dump(mode="json")
    counts = [{"name": site, "train": [80, 15, 5], "valid": [8, 2, 0], "test": [16, 3, 1]} for site in SITES]
    start = {"run": cell.label, "method": cell.row.method, "classes": CLASSES, "sites": counts, "parameters": 98_000}
    lines = [{"event": "start", "config": config, "channels": 3, "image_size": 32, "version": "0.1.0", **start}]

    def scored(f1: float) -> dict[str, Any]:
        metrics = {"macro_f1": f1, "balanced_accuracy": f1, "accuracy": f1, "balanced_auc": f1, "ece": 1 - f1}
        recall = [f1, f1 / 2, None]
        return {"metrics": metrics | {"worst_class_recall": f1 / 2, "loss": 1.0}, "recall": recall, "n": 20}

    for number in range(4):
        if number:
            work = {site: {"seconds": 1.0, "sent": 1000, "received": 500, "loss": 1.0} for site in SITES}
            lines.append({"event": "round", "round": number, "seconds": 2.0, "sites": work, "missing": {}})
        for view in (*VIEWS[name], "trained")[: None if number else -1]:
            gain = 0.02 if view == "trained" else 0.0
            for site in SITES:
                told = {"round": number, "part": "valid", "view": view, "site": site}
                lines.append({"event": "evaluation", **told, **scored(value * number / 3 + gain)})
    chosen = {"rule": "best", "round": 3, "view": VIEWS[name][-1]}
    lines.append({"event": "selection", "metric": "balanced_accuracy", "value": value, **chosen})
    for view in VIEWS[name]:
        f1 = value + (view_gain / 100 if view == "global" and len(VIEWS[name]) > 1 else 0)
        final = {"event": "final", "part": "test", "rule": "best", "round": 3, "view": view}
        for site, shift in zip(SITES, (0.1, -0.1)):
            lines.append({**final, "scope": "site", "site": site, **scored(f1 + shift)})
        lines += [{**final, "scope": scope, "site": None, **scored(f1)} for scope in ("mean", "pooled")]
    cohort = {"event": "final", "part": "test", "rule": "best", "round": 3, "view": VIEWS[name][-1]}
    lines.append({**cohort, "scope": "cohort", "site": "Graz", **scored(0.3)})
    return [*lines, {"event": "end", "seconds": 12.0}]


def make_up(study: StudyConfig, folder: Path) -> StudyConfig:
    for cell in grid(study, folder):
        if cell.row.name in SCORES:
            cell.folder.mkdir(parents=True)
            lines = [json.dumps(line) for line in made_up_events(study, cell)]
            (cell.folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return study


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> Path:
    """The folder of a study with three methods, one of them personal, and one still to run; everything is written."""
    folder = tmp_path_factory.mktemp("made-up")
    write_study(collect(make_up(made_up_study(), folder), folder), folder)
    return folder


def rows_of(folder: Path) -> dict[str, Any]:
    return {row["method"]: row for row in json.loads((folder / "summary.json").read_text())["rows"]}


def test_summary_gives_mean_deviation_and_number_of_seeds_in_per_cent(made_up):
    rows = rows_of(made_up)
    assert rows["fedavg"]["macro_f1"] == {"mean": pytest.approx(52.0), "std": pytest.approx(2.0), "n": 3}
    assert rows["local"]["macro_f1"] == {"mean": pytest.approx(40.0), "std": None, "n": 1}
    keys = {"macro_f1", "balanced_accuracy", "balanced_auc", "accuracy", "worst_class_recall", "ece"}
    assert all(keys <= row.keys() for row in rows.values())
    whole = json.loads((made_up / "summary.json").read_text())
    assert (whole["study"], whole["scope"], whole["not_run"]) == ("made-up", "sites", ["central"])
    assert "best validation balanced accuracy" in whole["rule"] and "Test data took no part" in whole["rule"]
    assert whole["differs"] == ["64 px."] and whole["part"] == "test"


def test_scope_decides_between_personal_and_global_models(made_up, tmp_path):
    assert rows_of(made_up)["prr"]["view"] == "personal"
    assert rows_of(made_up)["prr"]["macro_f1"]["mean"] == pytest.approx(72.0)
    common = make_up(made_up_study(scope="common"), tmp_path)
    rewrite(tmp_path, common_set)
    rows = {row["method"]: row for row in summary(collect(common, tmp_path))["rows"]}
    assert rows["prr"]["view"] == "global" and rows["prr"]["macro_f1"]["mean"] == pytest.approx(67.0)
    assert rows["local"]["view"] == "personal", "a method without a global model shows its personal ones"


def test_a_study_may_report_models_as_they_are_right_after_local_training(tmp_path, monkeypatch):
    study = made_up_study(scope="trained")
    monkeypatch.setitem(VIEWS, "fedavg", ("global", "trained"))
    results = collect(make_up(study, tmp_path), tmp_path)
    found = summary(results)
    assert (found["scope"], found["models"]) == ("sites", "trained")
    rows = {row["method"]: row for row in found["rows"]}
    assert (rows["fedavg"]["view"], rows["prr"]["view"], rows["local"]["view"]) == ("trained", "personal", "personal")
    assert rows["fedavg"]["views"].keys() == {"global", "trained"}
    head, _, fedavg, *_ = (line for line in to_markdown(results).splitlines() if line.startswith("|"))
    shown = dict(zip(head.split(" | "), fedavg.split(" | ")))
    assert shown["Macro F1, after local training"] == "52.00 ± 2.00†" and shown["Macro F1, global"] == "47.00 ± 2.00"
    assert all(cell_config(study, cell).evaluation.trained_test for cell in grid(study, tmp_path))


def test_times_of_runs_that_shared_a_device_compare_no_methods(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    for cell in grid(study, tmp_path, only=["prr"]):
        (cell.folder / "study.json").write_text('{"together": 4}')
    results = collect(study, tmp_path)
    rows = {row["method"]: row["cost"] for row in summary(results)["rows"]}
    assert rows["prr"]["relative_seconds"] is None and rows["local"]["relative_seconds"] == 1.0
    assert rows["prr"]["relative_traffic"] == 1.0 and rows["prr"]["seconds_per_round"] == 2.0
    told = "Up to 4 runs shared the device and waited for each other: times compare no methods."
    assert all(told in text for text in (render(results), to_markdown(results), to_latex(results)))


def test_a_row_may_name_the_models_that_it_reports(tmp_path):
    study = made_up_study()
    named = {"view": "global", "settings": {"prr": {"global_view": True}}}
    changed = [row.model_copy(update=named) if row.name == "prr" else row for row in study.rows]
    study = make_up(study.model_copy(update={"rows": tuple(changed)}), tmp_path)
    rows = {row["method"]: row for row in summary(collect(study, tmp_path))["rows"]}
    assert rows["prr"]["view"] == "global" and rows["prr"]["macro_f1"]["mean"] == pytest.approx(67.0)


def test_a_row_whose_models_wait_for_the_test_shows_the_curve_of_those_that_chose_the_round(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    for path in tmp_path.glob("runs/prr-seed*/events.jsonl"):
        kept = [line for line in map(json.loads, path.read_text().splitlines()) if not is_curve(line, "personal")]
        chosen = [line | {"view": "global"} if line["event"] == "selection" else line for line in kept]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in chosen))
    results = collect(study, tmp_path)
    rows = {row.row.name: row for row in results.rows if row.runs}
    views = {name: {curve_view(run, row) for run in row.runs} for name, row in rows.items()}
    assert rows["prr"].view == "personal"
    assert views == {"fedavg": {"global"}, "prr": {"global"}, "local": {"personal"}}
    assert "For prr the models that chose the round" in render(results)


def is_curve(line: dict[str, Any], view: str) -> bool:
    return line["event"] == "evaluation" and line["view"] == view


def test_a_setting_newer_than_a_finished_run_does_not_part_it_from_its_study(tmp_path):
    study = made_up_study()
    config = cell_config(study, grid(study, tmp_path)[0])
    recorded = config.model_dump(mode="json")
    del recorded["evaluation"]["select"]
    assert deviations(config, recorded) == {}
    recorded["methods"]["prr"] = {"warmup": 5}  # which a preset may have for another method than this row's
    assert config.method != "prr" and deviations(config, recorded) == {}
    by_site = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"select": "site"})})
    assert deviations(by_site, recorded) == {"evaluation.select": ("federation", "site")}


def test_a_study_file_that_is_not_utf8_is_refused_with_file_and_line(tmp_path):
    (tmp_path / "latin.toml").write_bytes('name = "study"\ntitle = "Zürich"\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.toml, line 2: the text is not UTF-8"):
        load_study(str(tmp_path / "latin.toml"))


@pytest.mark.parametrize("name", ["prr-dermoscopy", "prr-dermoscopy-grouped"])
def test_baselines_of_prr_average_as_they_are_defined(name, tmp_path):
    study = load_study(name)
    weights = {c.row.name: cell_config(study, c).train.aggregation for c in grid(study, tmp_path, full=True)}
    by_size = {row for row, weighting in weights.items() if weighting == "size"}
    assert by_size == {"fedavg", "fedprox", "silobn"} & weights.keys()
    assert weights["fedbn"] == weights["prr"] == "uniform"


def test_summary_has_sites_cohorts_costs_and_ranks(made_up):
    row = rows_of(made_up)["prr"]
    assert row["sites"]["Vienna"]["macro_f1"]["mean"] == pytest.approx(82.0)
    assert row["cohorts"]["Graz"]["macro_f1"]["mean"] == pytest.approx(30.0)
    assert row["cohorts"]["Graz"]["paper"] == {"macro_f1": 50.24}
    assert row["cost"]["sent_per_round"] == 1000 and row["cost"]["seconds_per_round"] == 2.0
    assert row["cost"]["relative_seconds"] == 1.0 and row["cost"]["flops_per_image"] > 1e6
    assert row["recall"] == {
        "nevus": {"mean": pytest.approx(72.0), "std": pytest.approx(np.sqrt(3)), "n": 3},
        "melanoma": {"mean": pytest.approx(36.0), "std": pytest.approx(np.sqrt(3) / 2), "n": 3},
    }
    assert json.loads((made_up / "summary.json").read_text())["mean_ranks"] == {"fedavg": 2.0, "prr": 1.0, "local": 3.0}


def test_tests_are_between_the_best_and_rows_with_seeds_enough(made_up):
    (test,) = json.loads((made_up / "summary.json").read_text())["tests"][""]
    expected = stats.ttest_rel(list(SCORES["prr"].values()), list(SCORES["fedavg"].values())).pvalue
    assert (test["best"], test["other"], test["pairs"]) == ("prr", "fedavg", 3)
    assert test["t_test"] == pytest.approx(expected) and test["wilcoxon"] == pytest.approx(0.25)


def test_pairs_over_seeds_and_sites_where_the_study_asks(tmp_path):
    study = make_up(made_up_study(pairs="seeds and sites"), tmp_path)
    (table,) = tables_of(collect(study, tmp_path), "")
    (test,) = table.comparisons
    assert test.pairs == len(SITES) * len(SCORES["prr"])


def test_every_table_carries_the_rule_and_the_papers_number(made_up):
    study = made_up_study()
    results = collect(study, made_up)
    rule = "Reported is the round with the best validation balanced accuracy"
    for text in (to_latex(results), to_markdown(results), render(results), to_csv(results)):
        assert rule in text
    page = render(results)
    assert page.count("64 px.") == 1, "the page says once, at its top, what differs; every table refers to it"
    assert "Paper: Table II. What differs from it stands at the top." in page
    latex = to_latex(results)
    assert r"72.00 $\pm$ 1.73 & 72.82" in latex and "Differs from the paper: 64 px." in latex
    assert r"52.00 $\pm$ 2.00$^\dagger$" in latex, "the t-test tells fedavg from prr, Wilcoxon's cannot with 3 pairs"
    line = next(row for row in csv.DictReader(io.StringIO(to_csv(results))) if row["method"] == "prr")
    assert float(line["macro_f1"]) == pytest.approx(72.0) and line["macro_f1_paper"] == "72.82"


def test_what_runs_changed_against_the_study_file_is_stated(made_up):
    other = made_up_study(settings={"train": {"rounds": 250}})
    assert "train.rounds = 20 instead of 250 (all runs)" in collect(other, made_up).deviations


def test_database_has_a_row_per_run_site_class_and_metric(made_up):
    base = sqlite3.connect(made_up / "study.sqlite")
    assert base.execute("SELECT count(*) FROM runs").fetchone() == (7,)
    found = base.execute(
        "SELECT seed, value FROM results WHERE row = 'prr' AND scope = 'site' AND site = 'Vienna' "
        "AND view = 'personal' AND class = 'melanoma' AND metric = 'recall' ORDER BY seed"
    ).fetchall()
    assert found == [(1, pytest.approx(0.4)), (2, pytest.approx(0.415)), (3, pytest.approx(0.415))]
    assert base.execute("SELECT max(round), count(DISTINCT site) FROM curves").fetchone() == (3, 2)
    assert base.execute("SELECT sum(sent) FROM traffic WHERE run = 'local-seed1'").fetchone() == (6000,)


@pytest.fixture
def logs_read(monkeypatch) -> list[str]:
    """The runs whose logs are read from here on."""
    read: list[str] = []

    def counted(folder: Path) -> Any:
        read.append(folder.name)
        return read_run(folder)

    monkeypatch.setattr(database, "read_run", counted)
    return read


def test_a_log_is_read_once_and_again_when_it_has_changed(tmp_path, logs_read):
    study = make_up(made_up_study(), tmp_path)
    first = summary(collect(study, tmp_path))
    assert len(logs_read) == 7
    assert summary(collect(study, tmp_path)) == first and len(logs_read) == 7
    log = tmp_path / "runs" / "local-seed1" / "events.jsonl"
    log.write_text(log.read_text().replace('"macro_f1": 0.4,', '"macro_f1": 0.61,'))
    changed = summary(collect(study, tmp_path))
    assert logs_read[7:] == ["local-seed1"]
    (local,) = (row for row in changed["rows"] if row["method"] == "local")
    assert local["macro_f1"]["mean"] == pytest.approx(61)
    shutil.rmtree(log.parent)
    assert [row["method"] for row in summary(collect(study, tmp_path))["rows"]] == ["fedavg", "prr"]
    base = sqlite3.connect(tmp_path / "study.sqlite")
    assert all(base.execute(f"SELECT count(*) FROM {table} WHERE run = 'local-seed1'").fetchone() == (0,)
               for table in database.TABLES)  # fmt: skip


@pytest.mark.parametrize("damage", ["", "no database", "version", "pages"])
def test_a_database_that_is_lost_damaged_or_of_another_version_is_made_anew(tmp_path, logs_read, damage):
    study = make_up(made_up_study(), tmp_path)
    first = summary(collect(study, tmp_path))
    path = tmp_path / "study.sqlite"
    if damage == "version":
        with sqlite3.connect(path) as base:
            base.execute("PRAGMA user_version = 7")
    elif damage == "pages":  # all after the first one
        known = path.read_bytes()
        path.write_bytes(known[:4096] + b"Z" * (len(known) - 4096))
    else:
        path.write_text(damage * 100)
    assert summary(collect(study, tmp_path)) == first and len(logs_read) == 14


def test_a_study_that_can_only_be_read_is_read(tmp_path, monkeypatch):
    study = make_up(made_up_study(), tmp_path)
    first = summary(collect(study, tmp_path))
    (tmp_path / "study.sqlite").unlink()
    (tmp_path / "study.sqlite").mkdir()  # no database can be opened there
    assert summary(collect(study, tmp_path)) == first


def test_a_reading_that_fails_leaves_the_database_before(tmp_path, monkeypatch):
    study = make_up(made_up_study(), tmp_path)
    collect(study, tmp_path)
    before = (tmp_path / "study.sqlite").read_bytes()
    log = tmp_path / "runs" / "local-seed1" / "events.jsonl"
    log.write_text(log.read_text() + "\n")
    monkeypatch.setattr(database, "_scores", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        collect(study, tmp_path)
    assert (tmp_path / "study.sqlite").read_bytes() == before


FIGURES = [
    "ranked",
    "data1-recall",
    "data1-learning",
    "data1-retrogress",
    "data1-cost",
    "data1-federation",
    "ranks",
]


def test_report_is_one_file_with_every_figure_and_number(made_up):
    page = (made_up / "report.html").read_text()
    for name in FIGURES:
        assert f'<figure id="{name}"' in page
    assert "72.00 ± 1.73" in page and "Not run yet: central" in page and "Graz" in page
    assert not re.search(r'(src|href)="https?:', page)


def test_report_opens_in_a_browser_without_an_error(made_up, browser):
    with opened(browser, made_up / "report.html") as page:
        assert drawn_figures(page) == FIGURES


@pytest.mark.parametrize("study", ["prr-dermoscopy", pytest.param("fedbm-pbc-0.05", marks=pytest.mark.slow)])
def test_reports_of_studies_on_real_images_open_with_every_figure(study, tmp_path, browser):
    report = tmp_path / "report.html"
    report.write_text(render(collect(load_study(study), ROOT / "results" / study)), encoding="utf-8")
    with opened(browser, report) as page:
        drawn = drawn_figures(page)
        assert len(drawn) > 4 and drawn == re.findall(r'<figure id="([^"]+)"', report.read_text())


def test_a_study_without_finished_runs_still_writes_its_tables(tmp_path):
    results = collect(made_up_study(), tmp_path)
    write_study(results, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] == []
    assert len(results.rows) == 4 and "Not run yet: fedavg" in (tmp_path / "report.html").read_text()


# ---- studies that choose settings ------------------------------------------------------------------------------------


def choosing_study(**changes: Any) -> StudyConfig:
    rows = [{"name": name, "method": name, "seeds": list(SCORES[name])} for name in SCORES]
    return made_up_study(part="valid", row=rows, paper="", **changes)


def rewrite(folder: Path, change: Any) -> None:
    """Pass every event of the runs through a function that returns the events to stand in its place."""
    for path in folder.glob("runs/*/events.jsonl"):
        kept = [new for line in map(json.loads, path.read_text().splitlines()) for new in change(line)]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))


def common_set(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Sites that only train; the global model is measured on a common set, and every site's own model too."""
    if line["event"] == "start":
        trains = [site | {"valid": [0, 0, 0], "test": [0, 0, 0]} for site in line["sites"]]
        common = {"name": "common", "train": [0, 0, 0], "valid": [8, 2, 0], "test": [16, 3, 1]}
        return [line | {"sites": [*trains, common]}]
    at_site = line["event"] == "evaluation" or line.get("scope") == "site"
    if at_site and line["view"] == "global":
        return [line | {"site": "common"}] * (line["site"] == SITES[0])
    return [line]


def choose_round_2(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [line | {"round": 2} if line["event"] in ("selection", "final") else line]


def test_validation_scores_of_a_study_are_those_of_the_selected_round_in_the_events(straight):
    results = collect(tiny_study(part="valid"), straight)
    for row, view in zip(summary(results)["rows"], ("global", "personal"), strict=True):
        folder = straight / "runs" / f"{row['method']}-seed1"
        (chosen,) = events(folder, "selection")
        scored = [
            line
            for line in events(folder, "evaluation")
            if (line["round"], line["part"], line["view"]) == (chosen["round"], "valid", view)
        ]
        assert len(scored) == 2 and row["view"] == view and row["selected_rounds"] == [chosen["round"]]
        for metric in ("macro_f1", "balanced_accuracy", "balanced_auc", "accuracy", "worst_class_recall", "ece"):
            by_site = {line["site"]: 100 * line["metrics"][metric] for line in scored}
            assert row[metric]["mean"] == pytest.approx(np.mean([*by_site.values()]))
            assert {site: own[metric]["mean"] for site, own in row["sites"].items()} == pytest.approx(by_site)
        assert row["validation"]["mean"] == row["balanced_accuracy"]["mean"], "the score that chose the round"
        counts = np.sum([line["confusion"] for line in scored], axis=0)
        recall = dict(zip(results.runs[0].start.classes, 100 * counts.diagonal() / counts.sum(1)))
        assert {name: each["mean"] for name, each in row["recall"].items()} == pytest.approx(recall)
    page = render(results)
    assert "Recall of each class over all validation images" in page and "test images;" not in page


def test_a_study_that_chooses_settings_shows_validation_in_every_table(tmp_path, capsys):
    study = make_up(choosing_study(), tmp_path)
    rewrite(tmp_path, choose_round_2)
    results = collect(study, tmp_path)
    write_study(results, tmp_path)
    whole = json.loads((tmp_path / "summary.json").read_text())
    rows = rows_of(tmp_path)
    assert whole["part"] == "valid" and "best validation balanced accuracy" in whole["rule"]
    assert rows["prr"]["macro_f1"]["mean"] == pytest.approx(48.0) and rows["prr"]["selected_rounds"] == [2, 2, 2]
    assert rows["prr"]["sites"]["Vienna"]["macro_f1"]["mean"] == pytest.approx(48.0)
    assert rows["prr"]["views"].keys() == {"global", "personal", "trained"} and not rows["prr"]["cohorts"]
    assert whole["tests"][""][0]["difference"] == pytest.approx(48.0 - 52.0 * 2 / 3)
    print_tables(Console(), results)
    shown = {path.name: path.read_text() for path in tmp_path.glob("*.*") if path.suffix != ".sqlite"}
    console = " ".join(capsys.readouterr().out.split())
    assert "made-up: validation, %" in console and "48.00 ± 1.15" in console
    for name, text in [*shown.items(), ("console", console)]:
        assert "Scores are of validation images; test images have no part in them." in text, name
        assert "Test data took no part" not in text, name
    assert all("48.00 ± 1.15" in shown[name] for name in ("table.md", "report.html"))
    assert "Validation, per cent." in shown["table.tex"] and "Test, per cent." not in shown["table.tex"]
    base = sqlite3.connect(tmp_path / "study.sqlite")
    assert base.execute("SELECT DISTINCT part FROM results").fetchall() == [("valid",)]


def test_sites_that_were_left_out_are_named_under_the_table(tmp_path, capsys):
    def leave_out(line):
        return [line | {"missing": {"Graz": "it was lost"}} if line["event"] == "round" else line]

    study = make_up(made_up_study(), tmp_path)
    rewrite(tmp_path, leave_out)
    results = collect(study, tmp_path)
    write_study(results, tmp_path)
    print_tables(Console(width=200), results)
    text = "All runs: Graz was left out of round"
    assert text in capsys.readouterr().out
    assert any(text in warning for warning in json.loads((tmp_path / "summary.json").read_text())["warnings"])
    assert all(text in (tmp_path / name).read_text() for name in ("table.md", "table.tex", "report.html"))


@pytest.mark.parametrize(("width", "below"), [(40, True), (200, False)])
def test_on_a_narrow_console_deviations_stand_below_the_means(width, below, tmp_path, capsys):
    study = make_up(choosing_study(), tmp_path)
    print_tables(Console(width=width), collect(study, tmp_path))
    assert below == any(line.lstrip().startswith("±") for line in capsys.readouterr().out.splitlines())


def test_no_test_score_has_an_effect_on_a_study_that_chooses_settings(tmp_path):
    def with_test(line):
        tested = line | {"part": "test", "metrics": {"macro_f1": 0.9}}
        return [line, tested] if line["event"] == "evaluation" else [line]

    written = []
    for name, change in (("with", with_test), ("without", lambda line: [line] * (line["event"] != "final"))):
        folder = tmp_path / name
        study = make_up(choosing_study(), folder)
        rewrite(folder, change)
        write_study(collect(study, folder), folder)
        texts = {path.name: path.read_text() for path in folder.glob("*.*") if path.suffix != ".sqlite"}
        dump = (line for line in sqlite3.connect(folder / "study.sqlite").iterdump() if '"logs"' not in line)
        written.append(texts | {"study.sqlite": "".join(dump)})
    assert written[0].keys() >= {"summary.json", "table.csv", "table.md", "table.tex", "report.html"}
    assert written[0] == written[1]


def test_a_score_that_validation_lacks_is_a_dash(tmp_path):
    def without_error(line):
        if line["event"] == "evaluation":
            del line["metrics"]["ece"]
        return [line]

    study = make_up(choosing_study(), tmp_path)
    rewrite(tmp_path, without_error)
    results = collect(study, tmp_path)
    write_study(results, tmp_path)
    assert r"local & 40.00 & -- \\" in to_latex(results)
    assert all(row["ece"] is None and row["macro_f1"] for row in rows_of(tmp_path).values())


def test_models_right_after_training_are_judged_on_validation_alone_where_settings_are_chosen(tmp_path):
    study = make_up(choosing_study(scope="trained"), tmp_path)
    settings = [cell_config(study, cell).evaluation for cell in grid(study, tmp_path)]
    assert all(each.trained and not each.trained_test for each in settings)
    rows = {row["method"]: row for row in summary(collect(study, tmp_path))["rows"]}
    assert rows["fedavg"]["view"] == "trained" and rows["fedavg"]["macro_f1"]["mean"] == pytest.approx(54.0)


@pytest.mark.parametrize("name", ["fedbm-tuning-ham10000", "fedbm-tuning-pbc"])
def test_shipped_studies_that_choose_settings_show_no_test_score(name):
    assert load_study(name).part == "valid"


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Any:
    import typer

    from equipoise.cli.study import study

    app = typer.Typer()
    app.command()(study)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


def test_command_runs_chosen_rows_and_writes_the_report(tmp_path):
    import tomli_w

    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(TINY))
    done = command(str(tmp_path / "tiny.toml"), "--out", str(tmp_path), "--only", "local", "--set", "train.rounds=1")
    assert done.exit_code == 0, done.output
    config = tomllib.loads((tmp_path / "tiny" / "runs" / "local-seed1" / "config.toml").read_text())
    assert config["train"]["rounds"] == 1
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert [row["method"] for row in summary["rows"]] == ["local"] and summary["not_run"] == ["fedavg"]
    assert (tmp_path / "tiny" / "report.html").is_file()


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (["a"], ["a"]),
        (["a, b"], ["a, b"]),
        (["a,c"], ["a", "c"]),
        (["a, c"], ["a", "c"]),
        (["a, b", "c"], ["a, b", "c"]),
        ([], None),
    ],
)
def test_rows_are_chosen_by_name_even_where_a_name_has_a_comma(asked, chosen):
    from equipoise.cli.study import _rows

    rows = [
        {"name": name, "method": "fedavg", "settings": {"train": {"rounds": n}}}
        for n, name in enumerate(["a", "a, b", "c"], 1)
    ]
    assert _rows(tiny_study(row=rows), asked) == chosen


@pytest.mark.parametrize("more", [["--report-only"], ["--only", "local", "--limit-seconds", "0"]])
def test_without_finished_runs_the_tables_of_others_stay(tmp_path, more):
    import tomli_w

    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(TINY))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "summary.json").write_text("made elsewhere")
    done = command(str(tmp_path / "tiny.toml"), "--out", str(tmp_path), *more)
    assert (tmp_path / "tiny" / "summary.json").read_text() == "made elsewhere"
    assert not (tmp_path / "tiny" / "report.html").exists()
    if more == ["--report-only"]:
        assert isinstance(done.exception, UserError) and "holds no finished run" in str(done.exception)
    else:
        assert done.exit_code == 0 and "1 run is not finished" in done.output


def test_a_setting_that_is_wrong_in_a_row_is_told_by_the_row(tmp_path):
    row = {"name": "a", "method": "fedprox", "settings": {"fedprox": {"mu": -1.0}}}
    study = StudyConfig.model_validate(TINY | {"row": [row]})
    with pytest.raises(UserError, match=r"study tiny, row a: \[fedprox\] is not valid"):
        cell_config(study, grid(study, tmp_path)[0])


def test_names_with_a_comma_are_told_apart_in_a_list():
    assert listed(["fedavg", "fedavg, all sites", "prr"]) == "fedavg, 'fedavg, all sites', prr"


def test_a_seed_named_twice_is_refused():
    done = command("phantom-prr", "--seeds", "1,2,2")
    assert isinstance(done.exception, UserError) and str(done.exception) == "--seeds: 2 is named twice"


def test_command_lists_the_studies():
    shown = command("list")
    assert shown.exit_code == 0 and all(name[:12] in shown.output for name in study_names())


def test_distances_in_pixels_are_no_columns_of_tables_in_per_cent(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(tomli_w.dumps(TINY | {"metrics": ["dice", "hd95"]}))
    with pytest.raises(UserError, match="hd95 are distances"):
        load_study(str(path))
    path.write_text(tomli_w.dumps(TINY | {"metrics": ["dice", "iou"]}))
    assert load_study(str(path)).metrics == ("dice", "iou")
