"""The studies on frozen features: their files, and the scores that the page of results shows."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

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


@pytest.mark.parametrize("study", STUDIES)
def test_files_are_written_from_the_registry_and_the_chosen_settings(study, frozen, tuned):
    chosen = {name: own["settings"] for name, own in tuned[study].items()}
    rows = {row["name"]: row for row in frozen["rows_of"](study, chosen)}
    written = load_study(f"frozen-{study}")
    assert [row.name for row in written.rows] == [*rows], "run python benchmarks/frozen.py grids"
    for row in written.rows:
        assert row.method == rows[row.name]["method"] and row.settings == frozen["nested"](rows[row.name]["settings"])
    assert written.settings["data"]["kept_apart"] == "any"


@pytest.mark.parametrize("study", STUDIES)
def test_the_setting_with_the_best_validation_score_is_chosen(study, frozen, tuned):
    known = frozen["CORE"] | frozen["beyond"]()
    assert set(frozen["CORE"]) <= set(tuned[study]) <= set(known)
    for name, own in tuned[study].items():
        tried = frozen["candidates"](known[name][0])
        assert own["settings"] == tried[int(np.argmax(own["validation"]))]


@pytest.mark.parametrize("study", STUDIES)
def test_scores_follow_from_the_confusion_matrices(study):
    known = json.loads((ROOT / "results" / "frozen" / f"{study}.json").read_text(encoding="utf-8"))
    for rows in known["data"].values():
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


def test_all_patients_are_the_patients_of_all_sites():
    known = json.loads((ROOT / "results" / "frozen" / "dermoscopy.json").read_text(encoding="utf-8"))
    row = known["data"][""]["local"]["confusion"]
    own = np.sum([np.sum(matrix, axis=1) for matrix in row["own"]["1"].values()], axis=0)
    assert own.tolist() == known["images"]
    for matrix in row["any"]["1"].values():
        assert np.sum(matrix, axis=1).tolist() == known["images"]


def test_thirty_one_tables_are_covered():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import coverage as of_papers

    found = of_papers.coverage()
    assert len(found) == 31
    assert all(why for *_, state, why in found if not state.startswith("made"))
