"""Comparisons from Python and the command line: a grid of runs, its table, and going on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t, ttest_rel
from test_from_python import PHANTOM, SMALL

import equipoise as eq
from equipoise.cli.app import app
from harness import assert_same_bits, events

ROWS = {"plain": "fedavg", "near": {"method": "fedprox", "fedprox.mu": 1.0}, "local": "local"}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> eq.Comparison:
    folder = tmp_path_factory.mktemp("compared")
    fed = eq.load_federation("phantom", phantom=PHANTOM, store=folder / "data")
    return eq.compare(fed, ROWS, seeds=3, rounds=1, out=folder / "mine", settings=SMALL)


def test_the_table_has_means_intervals_and_tests_over_seeds(found):
    table = found.table("loss")
    scores = {name: [_mean(found.results[name, seed].path, "loss") for seed in (1, 2, 3)] for name in ROWS}
    for name, own in scores.items():
        assert table.loc[name, ["n", "mean"]].tolist() == pytest.approx([3, np.mean(own)])
        assert table["low"][name] < table["mean"][name] < table["high"][name]
    best, other, last = table.index
    assert list(table["mean"]) == sorted(table["mean"]) and np.isnan(table["p"][best]), "the lowest loss is best"
    raw = sorted(ttest_rel(scores[best], scores[name]).pvalue for name in (other, last))
    corrected = [2 * raw[0], max(2 * raw[0], raw[1])]
    assert sorted(table["p"][[other, last]]) == pytest.approx([min(p, 1) for p in corrected]), "Holm's correction"
    assert found.table().index.name == "method" and found.report().exists() and "plain" in found._repr_html_()


def test_differences_from_the_best_share_images_and_seeds(found):
    table = found.table("accuracy")
    best, *others = table.index
    assert table.loc[best, ["difference", "from", "to", "probability"]].isna().all()
    for name in others:
        gap = table.loc[name]
        assert gap["difference"] == pytest.approx(gap["mean"] - table["mean"][best])
        assert gap["from"] <= gap["difference"] <= gap["to"] and 0 <= gap["probability"] <= 0.5


def test_a_study_writes_intervals_and_differences(found):
    summary = json.loads((found.path / "summary.json").read_text())
    rows = {row["method"]: row for row in summary["rows"]}
    primary = "macro_f1"
    best = max(rows, key=lambda name: rows[name][primary]["mean"])
    for name, row in rows.items():
        bounds = row["intervals"][primary]
        assert bounds["low"] <= row[primary]["mean"] <= bounds["high"]
        assert ("to_best" in row) == (name != best)
    other = next(row["to_best"] for name, row in rows.items() if name != best)
    assert other["best"] == best and other["low"] <= other["difference"] <= other["high"]
    for file in ("table.tex", "table.md", "report.html"):
        assert "Intervals over images and seeds" in (found.path / file).read_text(), file


def test_without_predictions_the_interval_is_over_seeds_alone(found, tmp_path):
    copied = shutil.copytree(found.path, tmp_path / "copied")
    for file in copied.rglob("predictions.npz"):
        file.unlink()
    table = eq.Comparison(copied).table("loss")
    for name in ROWS:
        own = [_mean(found.results[name, seed].path, "loss") for seed in (1, 2, 3)]
        half = t.ppf(0.975, 2) * np.std(own, ddof=1) / 3**0.5
        assert table.loc[name, ["low", "high"]].tolist() == pytest.approx([np.mean(own) - half, np.mean(own) + half])
    assert table["difference"].isna().all()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"metric": "view"}, "no score 'view'"),
        ({"metric": "round"}, "no score 'round'"),
        ({"scope": "site"}, "no scope 'site'; there are mean and pooled"),
    ],
)
def test_a_table_is_of_scores_with_one_number_for_each_run(asked, told, found):
    with pytest.raises(eq.UserError, match=told):
        found.table(**asked)


def test_intervals_end_where_scores_do(found):
    for name in ("balanced_auc", "worst_class_recall", *(c for c in found.scores() if c.startswith("recall("))):
        table = found.table(name)
        assert table["low"].min() >= 0 and table["high"].max() <= 1, name


def _mean(run: Path, metric: str) -> float:
    finals = [e for e in events(run, "final") if e["scope"] == "mean" and e["view"] != "trained"]
    return finals[-1]["metrics"][metric]


def test_a_comparison_goes_on_with_more_seeds_and_methods_but_not_with_other_settings(found, tmp_path):
    fed = eq.load_federation("phantom", phantom=PHANTOM, store=found.path.parent / "data")
    logs = {path: path.read_bytes() for path in found.path.rglob("events.jsonl")}
    more = eq.compare(fed, {**ROWS, "bn": "fedbn"}, seeds=1, rounds=1, out=found.path, settings=SMALL)
    assert ("bn", 1) in more.results and all(path.read_bytes() == log for path, log in logs.items())
    with pytest.raises(eq.UserError, match="other settings or data; choose another out"):
        eq.compare(fed, ROWS, seeds=3, rounds=2, out=found.path, settings=SMALL)


def test_components_make_a_further_row_of_each_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fed = eq.load_federation("phantom", phantom=PHANTOM, store=tmp_path / "data")
    rows = ["fedavg", "fedbn+prox"]
    found = eq.compare(fed, rows, components=["margins"], seeds=1, rounds=1, out="mine", settings=SMALL)
    added = {name: set(result.config.components) for (name, _), result in found.results.items()}
    assert added == {
        "fedavg": set(), "fedavg+margins": {"margins"},
        "fedbn+prox": {"prox"}, "fedbn+prox+margins": {"prox", "margins"}
    }  # fmt: skip
    sets = [f"--set={key}={value}" for key, value in SMALL.items()]
    sets += [f"--set=data.phantom.{key}={value}" for key, value in PHANTOM.items()]
    command = ["compare", "--method=fedavg", "--with=margins", "--seeds=1", "--rounds=1", "--out=command", *sets]
    app([*command, f"--set=data.store='{tmp_path / 'data'}'"], standalone_mode=False)
    for name in ("fedavg", "fedavg+margins"):
        both = (Path(folder, "runs", f"{name}-seed1") for folder in ("mine", "command"))
        assert_same_bits(*(eq.load_result(folder).model().state_dict() for folder in both))


def test_no_data_is_no_phantom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for start in (lambda: eq.train(None, out="run"), lambda: eq.compare(None, ["fedavg"], out="run")):
        with pytest.raises(eq.UserError, match=r"federation is None.*'phantom', the built-in images"):
            start()
    with pytest.raises(eq.UserError, match="federation = ndarray is no federation"):
        eq.train(np.zeros(3), out="run")
    with pytest.raises(eq.UserError, match=r"settings = .* is no table"):
        eq.train("phantom", out="run", settings=["train.rounds=1"])
    with pytest.raises(eq.UserError, match="asks for no run"):
        eq.compare("phantom", ["fedavg"], seeds=-1, out="run")
    assert not Path("run").exists()


def test_what_is_no_federation_is_not_evaluated_on(found):
    with pytest.raises(eq.UserError, match="federation = int is no federation"):
        found.results["plain", 1].evaluate(3)


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ("fedavg", "give a list"),
        (["fedavgg"], "did you mean 'fedavg'"),
        ({"mine": {"prr.pfa": "off"}}, "names no method"),
        ({"mine": {"method": "fedavg", "prr.pfa": "off"}}, "options of prr have no effect"),
        (["fedavg", "fedavg "], "fedavg "),
    ],
)
def test_bad_comparisons_are_refused_before_anything_is_written(methods, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(eq.UserError, match=told):
        eq.compare("phantom", methods, out="mine", progress=True)
    assert not Path("mine").exists()


def test_a_folder_without_a_comparison_is_refused(tmp_path):
    with pytest.raises(eq.UserError, match="holds no comparison"):
        eq.Comparison(tmp_path)


def test_a_run_is_not_compared_with_a_method(found):
    with pytest.raises(eq.UserError, match="is a run, and others named are none"):
        app(["compare", str(found.results["plain", 1].path), "fedavg"], standalone_mode=False)
