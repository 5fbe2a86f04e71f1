"""Intervals: they cover, groups widen them, resamples of nothing but the sample are the metrics themselves."""

import numpy as np
import pytest

from equipoise.bootstrap import (
    FEWEST_SITES,
    Resampled,
    drawn_weights,
    exact_counts,
    generator_of,
    interval,
    over_seeds,
    over_sites,
    paired,
    with_sample,
)
from equipoise.metrics import EVERY, METRICS, confusion_matrix, measure
from equipoise.probabilities import calibration_bins, per_class_auc


def predicted(images, classes=3, seed=0, sharpness=1.0):
    """Labels, probabilities and predictions of a mediocre model."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, images)
    logits = random.normal(size=(images, classes)) + sharpness * np.eye(classes)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return labels, probabilities, probabilities.argmax(1)


def resamples(labels, probabilities, predictions, groups, name="x", draws=1000):
    weights = with_sample(drawn_weights(groups.max() + 1, generator_of(name), draws))
    return Resampled(labels, probabilities, predictions, groups, weights)


def test_resamples_that_draw_everything_once_are_the_metrics_themselves():
    labels, probabilities, predictions = predicted(200)
    labels[:3] = 0
    probabilities[5:9] = probabilities[10]  # ties
    predictions = probabilities.argmax(1)
    once = np.ones((3, 200), dtype=np.float32)
    found = Resampled(labels, probabilities, predictions, np.arange(200), once)
    loss = -np.log(probabilities[np.arange(200), labels]).sum()
    counts = {
        "confusion": confusion_matrix(labels, predictions, 3),
        "calibration": np.stack(calibration_bins(labels, probabilities)),
        "auc": per_class_auc(labels, probabilities),
        "loss": loss,
        **exact_counts(labels, probabilities),
    }
    expected = measure(counts, EVERY)
    for metric in METRICS:
        assert metric.of(found) == pytest.approx(np.full(2, expected[metric.name]), abs=1e-6), metric.name


def test_weighted_resamples_equal_repeated_images():
    labels, probabilities, predictions = predicted(60)
    groups = np.repeat(np.arange(20), 3)
    weights = with_sample(drawn_weights(20, generator_of("repeated"), 5))
    found = Resampled(labels, probabilities, predictions, groups, weights)
    for row in range(5):
        again = np.repeat(np.arange(60), weights[row + 1][groups].astype(int))
        own = Resampled(labels[again], probabilities[again], predictions[again], np.arange(len(again)),
                        np.ones((2, len(again)), np.float32))  # fmt: skip
        for metric in METRICS:
            assert metric.of(found)[row] == pytest.approx(metric.of(own)[0], abs=1e-6), metric.name


def test_a_class_that_a_resample_lacks_keeps_its_value():
    labels = np.array([0] * 30 + [1])
    constant = np.tile([0.9, 0.1], (31, 1))
    found = resamples(labels, constant, np.zeros(31, dtype=int), np.arange(31))
    assert (found.true[:, 1] == 0).any()
    balanced = METRICS[0].of(found)
    assert np.unique(balanced).tolist() == [0.5]


def test_intervals_cover_at_about_the_nominal_rate():
    covered, truth = 0, None
    for trial in range(-1, 300):
        images = 150 if trial >= 0 else 200_000
        labels, probabilities, predictions = predicted(images, seed=trial + 1, sharpness=1.5)
        value = (labels == predictions).mean()
        if trial < 0:
            truth = value
            continue
        found = resamples(labels, probabilities, predictions, np.arange(images), f"{trial}", draws=400)
        bounds = interval(value, np.asarray(found.accuracy))
        covered += bounds.low <= truth <= bounds.high
    assert 0.92 <= covered / 300 <= 0.98


def test_copies_of_an_image_count_as_one_when_they_are_a_group():
    labels, probabilities, predictions = (np.repeat(own, 5, axis=0) for own in predicted(80))
    copies, alone = np.repeat(np.arange(80), 5), np.arange(400)
    value = (labels == predictions).mean()
    grouped, single = (
        interval(value, np.asarray(resamples(labels, probabilities, predictions, groups).accuracy))
        for groups in (copies, alone)
    )
    assert grouped.high - grouped.low == pytest.approx(np.sqrt(5) * (single.high - single.low), rel=0.15)


def test_a_method_does_not_differ_from_itself():
    values = np.array([0.5, 0.6, 0.7])
    resampled = np.random.default_rng(0).normal(0.6, 0.1, 500)
    found = paired(resampled, resampled, values, values)
    assert (found.difference.value, found.difference.low, found.difference.high) == (0.0, 0.0, 0.0)
    assert found.probability == 0.5 and np.isnan(found.effect)


def test_pairs_see_a_small_difference_on_shared_images():
    labels, probabilities, predictions = predicted(300)
    better = np.where(np.arange(300) % 20 == 0, labels, predictions)
    first, second = (resamples(labels, probabilities, own, np.arange(300)) for own in (better, predictions))
    scores = [np.array([(own == labels).mean()]) for own in (better, predictions)]
    found = paired(np.asarray(first.accuracy), np.asarray(second.accuracy), *scores)
    assert found.difference.low > 0 and found.probability > 0.99


def test_seeds_that_differ_widen_the_interval_by_their_spread():
    seeds = np.array([[0.1], [0.3], [0.5]]) * np.ones((3, 20_000))
    found = over_seeds(seeds, generator_of("seeds"))
    assert found.mean() == pytest.approx(0.3, abs=0.005)
    assert found.std() == pytest.approx(np.std([0.1, 0.3, 0.5], ddof=1) / np.sqrt(3), rel=0.03)


def test_few_sites_are_no_sample_of_sites():
    few, many = (
        np.linspace(0, 1, count)[:, None] * np.ones((count, 200)) for count in (FEWEST_SITES - 1, FEWEST_SITES)
    )
    assert np.ptp(over_sites(few, generator_of("sites"))) == pytest.approx(0, abs=1e-12)
    assert np.ptp(over_sites(many, generator_of("sites"))) > 0.1


def test_an_unknown_score_has_no_interval():
    found = interval(float("nan"), np.full(10, np.nan))
    assert np.isnan([found.value, found.low, found.high]).all()
