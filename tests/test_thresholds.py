"""Curves and temperatures: limit cases and known areas."""

import numpy as np
import pytest

from equipoise.probabilities import calibration_bins, per_class_auc
from equipoise.tallies import ece_from_bins
from equipoise.thresholds import net_benefit, precision_recall, reliability, roc, scaled, temperature, treat_all

RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 2, 400)
LOGITS = RANDOM.normal(size=(400, 2)) + 1.2 * np.eye(2)[LABELS]
PROBABILITIES = scaled(np.exp(LOGITS), 1.0)
POSITIVE = LABELS == 1


def test_the_area_under_the_roc_curve_is_the_auc():
    curve = roc(POSITIVE, PROBABILITIES[:, 1])
    assert (curve.x[0], curve.y[0], curve.x[-1], curve.y[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(curve.y, curve.x) == pytest.approx(per_class_auc(LABELS, PROBABILITIES)[1], abs=1e-12)


def test_precision_at_full_recall_is_the_prevalence():
    curve = precision_recall(POSITIVE, PROBABILITIES[:, 1])
    assert (curve.x[-1], curve.y[-1]) == (1, pytest.approx(POSITIVE.mean()))
    perfect = precision_recall(POSITIVE, POSITIVE.astype(float))
    assert perfect.y[0] == 1 and perfect.x[0] == 1


def test_a_model_that_alarms_at_everybody_is_worth_what_treating_all_is():
    curve = net_benefit(POSITIVE, np.ones(400))
    assert curve.y == pytest.approx(treat_all(POSITIVE))
    assert net_benefit(POSITIVE, POSITIVE.astype(float)).y == pytest.approx(np.full(99, POSITIVE.mean()))


def test_reliability_adds_up_to_the_calibration_error():
    confidence, accuracy, count = reliability(LABELS, PROBABILITIES)
    error = (np.abs(confidence - accuracy) * count).sum() / count.sum()
    assert error == pytest.approx(ece_from_bins(*calibration_bins(LABELS, PROBABILITIES)))


def test_the_temperature_undoes_a_scaling_of_the_logits():
    fitted = temperature(LABELS, PROBABILITIES)
    assert temperature(LABELS, scaled(PROBABILITIES, 0.25)) == pytest.approx(4 * fitted, rel=1e-3)
    assert scaled(scaled(PROBABILITIES, 0.25), 4.0) == pytest.approx(PROBABILITIES)
    assert (scaled(PROBABILITIES, 3.0).argmax(1) == PROBABILITIES.argmax(1)).all()
