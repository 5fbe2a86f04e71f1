"""What a run reports: images are counted once however many rounds are averaged, and add up over sites."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.engine.reported import added_over_sites, mean_over_rounds, mean_over_sites, reported_round
from equipoise.metrics import from_confusion

CLASSES = 3


def summary(confusion) -> dict:
    """Scores of a confusion matrix, as a task gives them."""

    def known(value):
        return None if np.isnan(value) else value

    counts, numbers = np.asarray(confusion), from_confusion(confusion)
    recall = [known(value) for value in numbers.pop("recall")]
    metrics = {name: known(value) for name, value in numbers.items()}
    return {"metrics": metrics, "recall": recall, "confusion": counts.tolist(), "n": int(counts.sum())}


@st.composite
def rounds_of_one_site(draw):
    """The numbers of images of each class, and confusion matrices of several rounds on these images."""
    held = draw(st.lists(st.integers(0, 30), min_size=CLASSES, max_size=CLASSES))

    def row(count):
        first = draw(st.integers(0, count))
        second = draw(st.integers(0, count - first))
        return [first, second, count - first - second]

    return held, [[row(count) for count in held] for _ in range(draw(st.integers(1, 6)))]


@given(rounds_of_one_site())
def test_rows_of_a_mean_over_rounds_add_up_to_the_images_of_each_class(case):
    held, matrices = case
    mean = mean_over_rounds([summary(matrix) for matrix in matrices])
    assert mean["n"] == sum(held)
    assert np.sum(mean["confusion"], axis=1) == pytest.approx(held)
    diagonal = np.diagonal(mean["confusion"])
    assert [found for found, count in zip(mean["recall"], held) if count] == pytest.approx(
        [found / count for found, count in zip(diagonal, held) if count]
    )
    assert [found for found, count in zip(mean["recall"], held) if not count] == [None] * held.count(0)
    assert mean.get("rounds", 1) == len(matrices)


@given(rounds_of_one_site())
def test_one_round_and_one_site_stay_as_they_are_to_the_last_character(case):
    alone = summary(case[1][0])
    assert json.dumps(mean_over_rounds([alone])) == json.dumps(mean_over_sites([alone])) == json.dumps(alone)


@given(st.lists(rounds_of_one_site(), min_size=2, max_size=4))
def test_images_of_sites_add_up_and_their_scores_are_averaged(cases):
    sites = [summary(matrices[0]) for _, matrices in cases]
    over = mean_over_sites(sites)
    assert over["n"] == sum(sum(held) for held, _ in cases) and "rounds" not in over
    assert np.array_equal(over["confusion"], np.sum([site["confusion"] for site in sites], axis=0))
    assert all(isinstance(cell, int) for row in over["confusion"] for cell in row)
    known = [site["metrics"]["accuracy"] for site in sites if site["metrics"]["accuracy"] is not None]
    assert over["metrics"]["accuracy"] == (pytest.approx(np.mean(known)) if known else None)


def test_a_score_without_a_confusion_matrix_leaves_none_to_add_or_average():
    known, unknown = summary(np.eye(CLASSES, dtype=int)), {**summary(np.eye(CLASSES, dtype=int)), "confusion": None}
    assert mean_over_rounds([known, unknown])["confusion"] is None
    assert added_over_sites([known, unknown]) == {"confusion": None, "n": 2 * CLASSES}


@pytest.mark.parametrize(
    ("view", "site", "own", "number"),
    [
        ("personal", "A", {}, 4),
        ("personal", None, {}, 4),
        ("personal", "A", {"A": 2}, 2),
        ("trained", "A", {"A": 2}, 2),
        ("global", "A", {"A": 2}, 4),
        ("personal", "B", {"A": 2}, 4),
        ("personal", None, {"A": 2}, None),
        ("global", None, {"A": 2}, 4),
    ],
)
def test_a_sites_own_round_holds_for_the_models_that_were_judged_and_what_they_were_before(view, site, own, number):
    assert reported_round(view, site, judged="personal", common=4, own=own) == number
