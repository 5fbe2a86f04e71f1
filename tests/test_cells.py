"""Confusion matrices of many classes are logged by their cells, and read back as they were."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from equipoise import cells
from equipoise.cells import MOST_DENSE, added, compact, dense
from equipoise.report import run_comparison, run_figures
from equipoise.report.record import read_run
from equipoise.studies.archive import _restored
from harness import run_tiny


def matrix(size: int, number: int, fractions: bool = False) -> np.ndarray:
    random = np.random.default_rng(number)
    counts = random.integers(0, 9, (size, size)) * (random.random((size, size)) < 0.05)
    return counts / 3 if fractions else counts


@pytest.mark.parametrize("fractions", [False, True])
@pytest.mark.parametrize("size", [2, MOST_DENSE, MOST_DENSE + 1, 200])
def test_matrices_come_back_as_they_were(size, fractions):
    wanted = matrix(size, 1, fractions)
    told = json.loads(json.dumps(compact(wanted)))
    assert isinstance(told, list) == (size <= MOST_DENSE)
    found = dense(told)
    assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    several = [matrix(size, number, fractions) for number in range(4)]
    assert np.array_equal(added([compact(each) for each in several]), np.sum(several, axis=0))


def test_an_empty_matrix_and_old_logs_are_read_too():
    assert not dense(compact(np.zeros((90, 90), int))).any()
    old, new = matrix(90, 1), matrix(90, 2)
    assert np.array_equal(added([old.tolist(), compact(new)]), old + new)


def test_a_thousand_classes_take_as_many_numbers_as_there_are_images():
    labels = np.random.default_rng(3).integers(0, 1000, (2, 400))
    counts = np.zeros((1000, 1000), int)
    np.add.at(counts, tuple(labels), 1)
    assert len(json.dumps(compact(counts))) < 10_000 < len(json.dumps(counts.tolist())) / 100


def test_a_log_of_cells_gives_the_frames_and_figures_of_a_log_of_matrices(tmp_path, monkeypatch):
    whole = run_tiny(tmp_path / "dense")
    monkeypatch.setattr(cells, "MOST_DENSE", 2)
    sparse = run_tiny(tmp_path / "cells")
    lines = (sparse / "events.jsonl").read_text()
    assert '"size": 4, "rows"' in lines and '"size": 4' not in (whole / "events.jsonl").read_text()
    one, other = read_run(whole), read_run(sparse)
    untold = ["offset", "confusion"]
    for name in ("finals", "evaluations", "validation"):
        frames = [getattr(run, name).drop(columns=untold, errors="ignore") for run in (one, other)]
        pd.testing.assert_frame_equal(*frames)
        for first, second in zip(*(getattr(run, name).get("confusion", ()) for run in (one, other))):
            assert (first is None or first != first) or np.array_equal(dense(first), dense(second))
    assert run_figures.confusion_matrices(one) == run_figures.confusion_matrices(other)
    pd.testing.assert_frame_equal(run_comparison.class_recall(one), run_comparison.class_recall(other))
    assert run_comparison.balanced(one) == run_comparison.balanced(other)
    logged = [event for event in map(json.loads, lines.splitlines()) if event["event"] == "evaluation"]
    assert logged and all(_restored(event)["recall"] == event["recall"] for event in logged)
