"""Methods compared on the same resamples: a method equals itself, folds count as one, seeds pair."""

import dataclasses

import numpy as np
import pytest

from equipoise.bootstrap import generator_of
from equipoise.engine.image_scores import Predictions
from equipoise.evidence.paired import RowEvidence, SharedResamples, compared
from equipoise.evidence.recomputed import Weights


def predictions(seed, skill=1.0, sites=2, images=120, groups=40, first=0, view="global"):
    """Predictions of a model of some skill; labels and groups are equal for all seeds."""
    labels = np.random.default_rng(99 + first).integers(0, 3, images)
    random = np.random.default_rng(seed)
    logits = random.normal(size=(images, 3)) + skill * np.eye(3)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    site = np.array([f"site {number % sites}" for number in range(images)])
    columns = {
        "split": np.full(images, "test"),
        "view": np.full(images, view),
        "site": site,
        "place": site,
        "round": np.full(images, 3 + seed),
        "image": np.array([f"{first + number}" for number in range(images)]),
        "group": np.array([f"g{first + number % groups}" for number in range(images)]),
        "label": labels,
        "prediction": probabilities.argmax(1),
        "probabilities": probabilities.astype(np.float32),
    }
    return Predictions(("a", "b", "c"), columns)


def test_a_method_differs_from_itself_by_nothing():
    runs = {name: {seed: [predictions(seed)] for seed in (1, 2, 3)} for name in ("first", "second")}
    shared = SharedResamples(runs, "test")
    first, second = (shared.row(name, "global", ["balanced_accuracy", "macro_f1"]) for name in runs)
    for metric in ("balanced_accuracy", "macro_f1"):
        found = compared(first, second, metric)
        assert (found.difference.value, found.difference.low, found.difference.high) == (0, 0, 0)
        assert found.probability == 0.5


def test_a_better_method_is_better_with_an_interval_that_excludes_zero():
    runs = {
        "good": {seed: [predictions(seed, skill=3.0)] for seed in (1, 2, 3)},
        "bad": {seed: [predictions(seed, skill=0.5)] for seed in (2, 3, 4)},
    }
    shared = SharedResamples(runs, "test")
    good, bad = (shared.row(name, "global", ["balanced_accuracy"]) for name in runs)
    found = compared(good, bad, "balanced_accuracy")
    assert found.difference.low > 0 and found.probability > 0.99 and found.effect > 1
    pair = good.of((2, 3)).values["balanced_accuracy"] - bad.of((2, 3)).values["balanced_accuracy"]
    assert found.difference.value == pytest.approx(pair.mean())


def test_an_interval_is_wider_with_seeds_than_over_images_alone():
    one = {"m": {1: [predictions(1)]}}
    several = {"m": {1: [predictions(1)], 2: [predictions(2, skill=4.0)], 3: [predictions(3, skill=0.0)]}}
    widths = []
    for runs in (one, several):
        bounds = SharedResamples(runs, "test").row("m", "global", ["accuracy"]).interval("accuracy")
        widths.append(bounds.high - bounds.low)
    assert widths[1] > 1.5 * widths[0]


def test_the_folds_of_a_seed_count_as_one_result_of_all_their_images():
    folds = [predictions(seed, first=1000 * seed) for seed in (1, 2)]
    shared = SharedResamples({"m": {1: folds}, "one": {1: folds[:1]}}, "test")
    both, one = (shared.row(name, "global", ["accuracy"]) for name in ("m", "one"))
    each = [(own.columns["label"] == own.columns["prediction"]).mean() for own in folds]
    assert both.values["accuracy"] == pytest.approx(np.mean(each), abs=0.01)
    widths = [np.ptp([*dataclasses.astuple(row.interval("accuracy"))[1:]]) for row in (both, one)]
    assert widths[0] == pytest.approx(widths[1] / np.sqrt(2), rel=0.25)


def test_places_draw_their_own_groups_and_models_at_one_place_share_them():
    weights = Weights([predictions(1), predictions(2)], draws=50)
    for place, own in weights.of.items():
        assert (own[1:].sum(1) == len(weights.names[place])).all() and (own[0] == 1).all()
    assert not np.array_equal(weights.of["site 0"][1:], weights.of["site 1"][1:])
    assert np.array_equal(generator_of("x").random(3), generator_of("x").random(3))


def test_a_view_that_no_run_has_gives_no_evidence():
    assert SharedResamples({"m": {1: [predictions(1)]}}, "test").row("m", "personal", ["accuracy"]) is None


def test_an_interval_of_few_seeds_ends_where_scores_do():
    row = RowEvidence((1, 2), {"accuracy": np.array([0.1, 1.0])}, {"accuracy": np.array([[0.1], [1.0]]).repeat(99, 1)})
    found = row.interval("accuracy")
    assert (found.low, found.value, found.high) == (pytest.approx(0.0, abs=0.1), pytest.approx(0.55), 1.0)


def test_the_probability_is_that_of_the_better_score_where_low_is_good():
    runs = {name: {1: [predictions(1, skill)]} for name, skill in (("good", 4.0), ("bad", 0.5))}
    shared = SharedResamples(runs, "test")
    good, bad = (shared.row(name, "global", ["loss"]) for name in runs)
    found = compared(good, bad, "loss")
    assert found.difference.high < 0 and found.probability > 0.99
