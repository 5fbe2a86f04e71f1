"""The studies on frozen features: their files, and the scores that the page of results shows."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from equipoise.methods import get_method
from equipoise.metrics import from_confusion
from equipoise.studies.study_file import load_study

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ("dermoscopy", "isic", "ham10000", "pbc")
METRICS = ("balanced_accuracy", "macro_f1", "worst_class_recall")


@pytest.fixture(scope="module")
def frozen() -> dict:
    """`benchmarks/frozen.py`, which writes the study files."""
    return runpy.run_path(str(ROOT / "benchmarks" / "frozen.py"))


@pytest.fixture(scope="module")
def tuned(frozen) -> dict:
    return json.loads(frozen["CHOSEN"].read_text(encoding="utf-8"))


@pytest.mark.parametrize("study", [*STUDIES, "authors"])
def test_files_are_written_from_the_registry_and_the_chosen_settings(study, frozen, tuned):
    rows = {row["name"]: row for row in frozen["rows_of"](study, frozen["chosen_for"](study, tuned))}
    written = load_study(f"frozen-{study}")
    assert [row.name for row in written.rows] == [*rows], "run python benchmarks/frozen.py grids"
    for row in written.rows:
        assert row.method == rows[row.name]["method"] and row.settings == frozen["nested"](rows[row.name]["settings"])
    data = written.settings["data"]
    assert data["split"] == "authors" if study == "authors" else data["kept_apart"] == "any"


@pytest.mark.parametrize("study", STUDIES)
def test_the_setting_with_the_best_validation_score_is_chosen(study, frozen, tuned):
    known = frozen["CORE"] | frozen["beyond"]()
    assert set(frozen["CORE"]) <= set(tuned[study]) <= set(known)
    for name, own in tuned[study].items():
        tried = frozen["candidates"](known[name][0])
        assert own["settings"] == tried[int(np.argmax(own["validation"]))]


@pytest.mark.parametrize("study", STUDIES)
def test_scores_follow_from_the_confusion_matrices(study, benchmarks):
    from frozen_scores import published

    for rows in published(study)["data"].values():
        assert {"local+balanced", "fednpr-per", "fediic", "fedbm", "prr", "closed, local", "equipoise"} <= set(rows)
        for row in rows.values():
            for patients, by_seed in row["confusion"].items():
                found = [[from_confusion(np.array(m)) for m in sites.values()] for sites in by_seed.values()]
                for metric in METRICS:
                    own = row[patients][metric]
                    values = [100 * np.mean([scores[metric] for scores in sites]) for sites in found]
                    assert own["by_seed"] == pytest.approx(values, abs=1e-3)
                    assert own["mean"] == pytest.approx(np.mean(values), abs=1e-3)
                    assert own["low"] - 0.01 <= own["mean"] <= own["high"] + 0.01
                    assert own["low"] >= 0 and own["high"] <= 100


@pytest.mark.parametrize("study", ["dermoscopy", "isic"])
def test_all_patients_are_the_patients_of_all_sites(study, benchmarks):
    from frozen_scores import published

    known = published(study)
    rows = [row["confusion"] for row in known["data"][""].values() if "own" in row["confusion"]]
    assert rows
    for row in rows:
        for seed, of_sites in row["own"].items():
            own = np.sum([np.sum(matrix, axis=1) for matrix in of_sites.values()], axis=0)
            assert own.tolist() == known["images"]
            for matrix in row["any"][seed].values():
                assert np.sum(matrix, axis=1).tolist() == known["images"]


def test_the_recipe_is_the_winner_of_its_search():
    search = json.loads((ROOT / "results" / "recipe.json").read_text(encoding="utf-8"))
    every, winner, options = search["candidates"], search["winner"], get_method("equipoise").options()
    assert (options.dimensions, options.shrinkage, options.prior, [options.others]) == (
        *(winner[name] for name in ("dimensions", "shrinkage", "prior")),
        winner["others"],
    )
    usual = np.mean([search["usual"][study] for study in ("dermoscopy", "pbc")], axis=0)
    for row in every:
        accuracy, f1, worst = np.mean([row["dermoscopy"], row["pbc"]], axis=0)
        assert row["merit"] == pytest.approx((accuracy + worst) / 2, abs=0.01)
        assert row["allowed"] == (f1 >= usual[1]) or f1 == pytest.approx(usual[1], abs=0.01)
    assert winner["merit"] == max(row["merit"] for row in every if row["allowed"])


def test_a_published_row_stays_until_a_new_one_has_as_many_seeds(benchmarks):
    from frozen_scores import merged

    old = {
        "a": {"seeds": [1, 2], "gaps": {"any": {"b": "old", "c": "old"}}},
        "b": {"seeds": [1, 2], "gaps": {}},
        "c": {"seeds": [1, 2], "gaps": {}},
    }
    new = {
        "a": {"seeds": [1, 2, 3], "machine": "this", "gaps": {"any": {"b": "new", "c": "new"}}},
        "b": {"seeds": [1, 2], "machine": "this", "gaps": {}},
        "c": {"seeds": [1], "machine": "this", "gaps": {}},
    }
    found = merged(old, new)
    assert {name: row["machine"] for name, row in found.items()} == {"a": "this", "b": "this", "c": "another"}
    assert found["a"]["gaps"]["any"] == {"b": "new", "c": "old"} and found["c"]["seeds"] == [1, 2]
    assert merged(found, new) == found


@pytest.mark.parametrize(
    ("gaps", "told"),
    [
        ([[2, 1, 3], [1, -1, 3], None], "holds on 1 of 2"),
        ([[-2, -3, -1], [0, -1, 1]], "does not hold: the reverse on 1 of 2"),
        ([[2, 1, 3], [-2, -3, -1]], "holds on 1 of 2, the reverse on 1"),
        ([[0, -1, 1]], "not shown"),
        ([None], "open"),
    ],
)
def test_a_verdict_counts_the_intervals_without_zero(gaps, told, benchmarks):
    from frozen_pages import verdict

    assert verdict(gaps) == told


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_thirty_one_tables_are_covered(benchmarks):
    import coverage as of_papers

    found = of_papers.coverage()
    assert len(found) == 31
    assert all(why for *_, state, why in found if not state.startswith("made"))
