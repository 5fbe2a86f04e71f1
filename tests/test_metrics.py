"""Metrics over the classes present, from samples and from counts that add up; significance tests."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as reference

from equipoise.core.errors import UserError
from equipoise.metrics import (
    Tally,
    accuracy,
    balanced_accuracy,
    balanced_auc,
    confusion_matrix,
    from_confusion,
    macro_f1,
    measure,
)
from equipoise.probabilities import calibration_bins, per_class_auc
from equipoise.statistics import holm, paired_t_test, wilcoxon_test
from equipoise.tallies import ece_from_bins

CLASSES = 5
samples = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=40).map(
    lambda pairs: np.array(pairs).T
)


def softmax(logits):
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def test_metrics_have_the_golden_values_without_the_absent_class(golden):
    case = {key: value.numpy() for key, value in golden("fednpr/metrics").items()}
    logits, labels = case["logits"].astype(np.float64), case["labels"]
    assert 3 not in labels
    assert balanced_accuracy(labels, logits.argmax(1)) == pytest.approx(float(case["bacc"]), rel=2e-5)
    assert balanced_auc(labels, softmax(logits)) == pytest.approx(float(case["bauc_exact"]), rel=2e-5)


@settings(max_examples=60, deadline=None)
@given(samples)
def test_metrics_agree_with_scikit_learn_over_the_classes_present(pair):
    labels, predictions = pair
    present = np.unique(labels)
    f1 = reference.f1_score(labels, predictions, labels=present, average="macro", zero_division=0)
    recall = reference.recall_score(labels, predictions, labels=present, average="macro", zero_division=0)
    assert macro_f1(labels, predictions, CLASSES) == pytest.approx(f1)
    assert balanced_accuracy(labels, predictions) == pytest.approx(recall)
    assert accuracy(labels, predictions) == pytest.approx(np.mean(labels == predictions))


@settings(max_examples=60, deadline=None)
@given(samples, samples)
def test_counts_of_sites_add_up_to_the_metrics_of_all_samples(first, second):
    labels, predictions = np.concatenate([first, second], axis=1)
    merged = from_confusion(confusion_matrix(*first, CLASSES) + confusion_matrix(*second, CLASSES))
    assert merged["balanced_accuracy"] == balanced_accuracy(labels, predictions)
    assert merged["macro_f1"] == macro_f1(labels, predictions, CLASSES)
    assert merged["accuracy"] == accuracy(labels, predictions)
    assert merged["worst_class_recall"] == np.nanmin(merged["recall"])


def test_a_class_that_is_predicted_but_absent_is_in_no_mean():
    labels, predictions = [0, 0, 1, 1], [0, 2, 1, 1]
    assert macro_f1(labels, predictions, 3) == pytest.approx((2 / 3 + 1) / 2)
    assert balanced_accuracy(labels, predictions) == 0.75
    assert np.isnan(from_confusion(confusion_matrix(labels, predictions, 3))["recall"][2])


def test_confusion_has_true_classes_in_rows():
    assert confusion_matrix([0, 0, 1], [1, 1, 0], 2).tolist() == [[0, 2], [1, 0]]


def test_no_sample_gives_nan_and_no_warning():
    with np.errstate(all="raise"):
        empty = from_confusion(np.zeros((3, 3), dtype=int))
        assert all(math.isnan(empty[name]) for name in ("balanced_accuracy", "macro_f1", "accuracy"))
        assert np.isnan(empty["recall"]).all() and math.isnan(empty["worst_class_recall"])
        assert math.isnan(balanced_accuracy([], [])) and math.isnan(ece_from_bins([0, 0], [0, 0], [0, 0]))


def test_auc_is_the_mean_of_exact_one_against_the_rest_areas():
    random = np.random.RandomState(0)
    labels, scores = random.randint(3, size=50), softmax(random.randn(50, 4))
    areas = [reference.roc_auc_score(labels == label, scores[:, label]) for label in range(3)]
    assert balanced_auc(labels, scores) == pytest.approx(np.mean(areas))
    assert per_class_auc(labels, scores)[:3] == pytest.approx(areas) and np.isnan(per_class_auc(labels, scores)[3])


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_areas_are_those_of_scikit_learn_to_the_last_bit_with_ties_too(samples, classes, levels, seed):
    random = np.random.default_rng(seed)
    labels = random.integers(classes, size=samples)
    scores = random.integers(levels, size=(samples, classes)) / levels
    areas = per_class_auc(labels, scores)
    for label in range(classes):
        alone = len({*labels}) == 1 or label not in labels
        area = math.nan if alone else reference.roc_auc_score(labels == label, scores[:, label])
        assert np.array_equal(areas[label], area, equal_nan=True)


def test_a_class_that_is_scored_with_nan_has_no_area_and_leaves_the_others_theirs():
    scores = np.array([[0.9, 0.1, math.nan], [0.2, 0.8, 0.3], [0.4, 0.3, 0.9]])
    assert per_class_auc([0, 1, 2], scores)[:2].tolist() == [1.0, 1.0] and math.isnan(
        per_class_auc([0, 1, 2], scores)[2]
    )
    assert np.isnan(per_class_auc(np.empty(0, int), np.empty((0, 3)))).tolist() == [True] * 3


def test_auc_of_one_class_alone_does_not_exist():
    assert math.isnan(balanced_auc([1, 1, 1], np.full((3, 2), 0.5)))
    assert balanced_auc([0, 1], [[0.9, 0.1], [0.2, 0.8]]) == 1.0


def test_auc_of_a_diverged_model_is_nan_and_no_error():
    assert math.isnan(balanced_auc([0, 1], np.full((2, 2), np.nan)))


def test_classes_outside_the_list_are_refused_by_name():
    with pytest.raises(UserError, match=r"predictions holds class 3.*0 to 2"):
        confusion_matrix([0, 1], [3, 1], 3)
    with pytest.raises(UserError, match="labels holds class -1"):
        balanced_auc([-1, 0], np.ones((2, 2)))
    with pytest.raises(UserError, match="3 labels but 2 predictions"):
        balanced_accuracy([0, 1, 1], [0, 1])


def test_classes_may_have_any_numbers_where_no_list_is_asked_for():
    assert balanced_accuracy([0, 0, 100_000], [10**9, 0, 100_000]) == 0.75
    assert accuracy([-1, -1, 1], [-1, 1, 1]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("labels", [[0.5, 1.0], [0.0, math.nan], [math.inf, 0], [1e300, 0], ["0", "1"]])
def test_labels_that_are_no_numbers_of_classes_are_refused(labels):
    with pytest.raises(UserError, match="labels: expected whole numbers"):
        balanced_accuracy(labels, [0, 1])


def test_scores_and_counts_of_another_shape_are_refused():
    with pytest.raises(UserError, match=r"expected \(samples, classes\)"):
        balanced_auc([0, 1], [0.2, 0.8])
    with pytest.raises(UserError, match="3 labels but 2 rows"):
        calibration_bins([0, 1, 1], np.ones((2, 2)))
    with pytest.raises(UserError, match=r"not the shape \(2, 3\)"):
        from_confusion(np.ones((2, 3)))


@pytest.mark.parametrize("bins", [10, 15, 100])
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(bins):
    edges = np.arange(1, bins + 1) / bins
    edges = edges[edges >= 0.5]
    count, _, _ = calibration_bins(np.zeros(len(edges), int), np.stack([edges, 1 - edges], 1), bins)
    assert count[-len(edges) :].tolist() == [1] * len(edges)


def test_calibration_bins_of_sites_add_up():
    random = np.random.RandomState(1)
    labels, scores = random.randint(4, size=60), softmax(2 * random.randn(60, 4))
    whole = calibration_bins(labels, scores)
    halves = zip(calibration_bins(labels[:25], scores[:25]), calibration_bins(labels[25:], scores[25:]))
    for total, (first, second) in zip(whole, halves):
        assert total == pytest.approx(first + second)
    assert whole[0].sum() == 60


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    scores = np.array([[0.95, 0.05], [0.95, 0.05], [0.4, 0.6], [1.0, 0.0]])
    # Bins of a tenth: two at .95 (one right), one at .6 (right), and 1.0 with the .95s (right).
    error = ece_from_bins(*calibration_bins([0, 1, 1, 0], scores, bins=10))
    assert error == pytest.approx((abs(2.9 - 2) + abs(0.6 - 1)) / 4)


def test_perfect_confidence_is_perfectly_calibrated():
    assert ece_from_bins(*calibration_bins([0, 1], np.eye(2))) == 0


def test_paired_tests_agree_with_scipy_and_know_no_difference():
    first, second = [0.71, 0.74, 0.73, 0.78, 0.76], [0.70, 0.71, 0.72, 0.73, 0.77]
    assert paired_t_test(first, second) == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert wilcoxon_test(first, second) == pytest.approx(stats.wilcoxon(first, second).pvalue)
    for test in (paired_t_test, wilcoxon_test):
        assert test(first, first) == 1.0
        assert test(first, second) == test(second, first)
        assert math.isnan(test([0.7], [0.6]))
        with pytest.raises(UserError, match="2 and 1"):
            test([0.7, 0.8], [0.6])


def test_holm_multiplies_the_smallest_most_and_never_reverses_the_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_holm_leaves_comparisons_that_could_not_be_made_uncounted():
    corrected = holm([0.02, float("nan"), 0.03])
    assert corrected[0] == pytest.approx(0.04) and math.isnan(corrected[1]) and corrected[2] == pytest.approx(0.04)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_between_no_correction_and_bonferroni(values):
    for value, corrected in zip(values, holm(values)):
        assert value <= corrected <= min(1.0, len(values) * value) + 1e-12


@settings(max_examples=60, deadline=None)
@given(samples)
def test_precision_is_scikit_learns_over_the_classes_present(pair):
    labels, predictions = pair
    tally = Tally({"confusion": confusion_matrix(labels, predictions, CLASSES)})
    present = np.unique(labels)
    expected = reference.precision_score(labels, predictions, labels=present, average=None, zero_division=0)
    assert tally.precision[present] == pytest.approx(expected)
    assert np.isnan(np.delete(tally.precision, present)).all()


def test_fedbms_score_is_the_sum_that_its_authors_choose_rounds_by():
    draws = np.random.default_rng(0)
    labels, probabilities = np.arange(60) % CLASSES, softmax(draws.normal(size=(60, CLASSES)))
    predictions = probabilities.argmax(1)
    counts = {"confusion": confusion_matrix(labels, predictions, CLASSES), "auc": per_class_auc(labels, probabilities)}
    expected = (
        reference.accuracy_score(labels, predictions)
        + reference.recall_score(labels, predictions, average="micro")
        + reference.precision_score(labels, predictions, average="macro", zero_division=0)
        + reference.f1_score(labels, predictions, average="macro")
        + reference.roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    )
    assert "fedbm_score" not in measure(counts)
    assert measure(counts, "fedbm_score")["fedbm_score"] == pytest.approx(expected)


@pytest.mark.parametrize("images", [2_047, 2_048, 3_000, 9_000])
def test_auc_of_more_images_than_are_sorted_at_a_time(images):
    """More pieces than classes are no pieces without a class."""
    random = np.random.default_rng(1)
    labels = random.integers(0, 3, images)
    scores = random.random((images, 3))
    wanted = [reference.roc_auc_score(labels == place, scores[:, place]) for place in range(3)]
    np.testing.assert_allclose(per_class_auc(labels, scores), wanted, rtol=1e-9)
