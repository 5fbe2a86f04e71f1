"""Partitions: the papers' draws exactly, and what every partition must keep whatever the seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.errors import UserError
from equipoise.data import partition
from equipoise.data.partition import concentration, dirichlet_equal, dirichlet_per_class, long_tail

LABELS = np.random.RandomState(5).choice(5, 600, p=[0.5, 0.2, 0.15, 0.1, 0.05])


@pytest.mark.parametrize("name", ["fediic/dirichlet_10clients", "fediic/dirichlet_20clients"])
def test_equal_partition_draws_the_golden_owners(golden, name):
    case = {key: value.numpy() for key, value in golden(name).items()}
    owners = dirichlet_equal(case["labels"], int(case["n_clients"]), float(case["alpha"]), int(case["seed"]))
    assert np.array_equal(owners, case["owner"])
    assert np.array_equal(owners[case["order"]], np.sort(owners)), "the sites' lists, laid end to end"
    counts = [np.bincount(case["labels"][owners == site], minlength=5) for site in range(int(case["n_clients"]))]
    assert np.array_equal(counts, case["counts"])


@pytest.mark.parametrize("name", ["fedbm/dirichlet_a0.05", "fedbm/dirichlet_a0.1"])
def test_per_class_partition_draws_the_golden_owners_empty_sites_too(golden, name):
    case = {key: value.numpy() for key, value in golden(name).items()}
    owners = dirichlet_per_class(case["labels"], int(case["n_clients"]), float(case["alpha"]), int(case["seed"]))
    assert np.array_equal(owners, case["owner"])
    assert np.array_equal(np.bincount(owners, minlength=int(case["n_clients"])), case["sizes"])


@settings(max_examples=15, deadline=None)
@given(sites=st.integers(10, 33), seed=st.integers(0, 2**31 - 1), alpha=st.floats(0.5, 10))
def test_equal_partition_gives_sites_equal_sizes(sites, seed, alpha):
    sizes = np.bincount(dirichlet_equal(LABELS, sites, alpha, seed), minlength=sites)
    assert sizes.sum() == len(LABELS) and len(sizes) == sites and np.ptp(sizes) <= 1


@settings(max_examples=15, deadline=None)
@given(sites=st.integers(1, 12), seed=st.integers(0, 2**31 - 1), alpha=st.floats(0.05, 10))
def test_per_class_partition_gives_every_sample_one_site(sites, seed, alpha):
    owners = dirichlet_per_class(LABELS, sites, alpha, seed)
    assert owners.shape == LABELS.shape and owners.min() >= 0 and owners.max() < sites


def test_a_small_alpha_skews_sites_more_than_a_large_one():
    def skew(alpha):
        owners = dirichlet_per_class(LABELS, 6, alpha, seed=0)
        counts = np.array([np.bincount(LABELS[owners == site], minlength=5) for site in range(6)])
        return np.std(counts / counts.sum(0), axis=0).mean()

    assert skew(0.1) > 3 * skew(100)


@settings(max_examples=15, deadline=None)
@given(sites=st.integers(1, 8), seed=st.integers(0, 2**31 - 1), removal=st.floats(0, 0.6))
def test_concentration_leaves_no_site_empty_and_no_sample_out(sites, seed, removal):
    owners = concentration(LABELS, sites, [50, 30, 10, 5, 0.5], removal, seed)
    assert owners.shape == LABELS.shape and np.array_equal(np.unique(owners), np.arange(sites))


def test_concentration_removes_classes_at_the_stated_rate():
    labels = np.repeat(np.arange(5), 4000)
    missing = []
    for seed in range(20):
        owners = concentration(labels, 20, [50.0] * 5, 0.3, seed)
        missing += [
            4000 - np.count_nonzero(labels[owners == site] == label) == 4000 for site in range(20) for label in range(5)
        ]
    assert 0.27 < np.mean(missing) < 0.33


def test_concentration_without_removal_follows_the_alphas():
    owners = concentration(np.repeat([0, 1], 5000), 10, [1000.0, 0.5], 0.0, seed=3)
    even, uneven = (np.bincount(part, minlength=10) / 5000 for part in np.split(owners, 2))
    assert np.abs(even - 0.1).max() < 0.02 < uneven.std()


@settings(max_examples=15, deadline=None)
@given(ratio=st.floats(1, 500), seed=st.integers(0, 2**31 - 1))
def test_long_tail_keeps_the_largest_class_whole_and_falls_by_rank(ratio, seed):
    kept = long_tail(LABELS, ratio, seed)
    assert np.array_equal(kept, np.unique(kept))
    before, after = np.bincount(LABELS), np.bincount(LABELS[kept], minlength=5)
    assert after[0] == before[0] and (after >= 1).all() and (after <= before).all()
    assert (np.diff(after) <= 0).all()


def test_long_tail_reaches_the_ratio_exponentially():
    kept = long_tail(np.repeat(np.arange(3), 1000), ratio=100, seed=0)
    assert np.bincount(np.repeat(np.arange(3), 1000)[kept]).tolist() == [1000, 100, 10]


@pytest.mark.parametrize(
    "divide",
    [
        lambda seed: dirichlet_equal(LABELS, 10, 1.0, seed),
        lambda seed: dirichlet_per_class(LABELS, 6, 0.5, seed),
        lambda seed: concentration(LABELS, 4, [1.0] * 5, 0.3, seed),
        lambda seed: long_tail(LABELS, 20, seed),
    ],
)
def test_a_seed_decides_the_partition_and_nothing_else(divide):
    np.random.seed(0)
    first = divide(3)
    np.random.seed(1)
    assert np.array_equal(first, divide(3)) and not np.array_equal(first, divide(4))


def test_a_class_number_that_no_sample_has_is_no_obstacle():
    labels = np.where(LABELS == 2, 6, LABELS)
    assert np.ptp(np.bincount(dirichlet_equal(labels, 10, 1.0, 0))) == 0
    assert len(dirichlet_per_class(labels, 3, 1.0, 0)) == len(labels)


def test_fewer_samples_than_sites_leave_sites_empty():
    few = np.array([0, 0, 1, 1, 1])
    assert dirichlet_per_class(few, 6, 0.5, 1).tolist() == [3, 4, 5, 3, 5]
    assert sorted(dirichlet_equal(np.arange(9) % 2, 10, 1.0, 0).tolist()) == list(range(9))


@pytest.mark.parametrize("seed", range(5))
def test_a_single_site_has_everything_however_small_alpha(seed):
    assert not dirichlet_per_class(LABELS, 1, 0.001, seed).any()


@pytest.mark.parametrize(
    "divide, message",
    [
        (lambda: dirichlet_equal(LABELS, 9, 1.0, 0), "num_sites=9.*at least 10"),
        (lambda: dirichlet_equal(LABELS, 10, 0.0, 0), "alpha=0.0.*above 0"),
        (lambda: dirichlet_per_class(LABELS, 0, 1.0, 0), "num_sites=0"),
        (lambda: dirichlet_per_class(LABELS, 5, 1e-9, 0), "alpha=1e-09: too small"),
        (lambda: dirichlet_per_class(LABELS, 5, 1e308, 0), r"alpha=1e\+308: too large"),
        (lambda: concentration(LABELS, 3, [1e-9] * 5, 0.3, 0), "alpha=1e-09: too small"),
        (lambda: dirichlet_per_class([], 4, 1.0, 0), "labels is empty"),
        (lambda: concentration(LABELS[:3], 4, [1.0] * 5, 0.3, 0), "num_sites=4: 3 samples cannot"),
        (lambda: dirichlet_per_class([-1, 0, 1], 2, 1.0, 0), "labels holds -1"),
        (lambda: concentration(LABELS, 3, [1.0], 0.3, 0), "alphas holds 1 values.*5 classes"),
        (lambda: concentration(LABELS, 3, [1, 1, 1, 1, -2], 0.3, 0), r"alphas\[4\]=-2"),
        (lambda: concentration(LABELS, 3, [1.0] * 5, 1.0, 0), "removal=1.0"),
        (lambda: long_tail(LABELS, 0.5, 0), "ratio=0.5"),
        (lambda: long_tail(LABELS, 2.0, 2**32), "seed=4294967296"),
        (lambda: dirichlet_per_class(LABELS, 4, 1.0, -1), "seed=-1"),
        (lambda: dirichlet_per_class([0.5, 1.0], 2, 1.0, 0), "labels: expected whole numbers.*float64"),
        (lambda: long_tail([0.5, 1.7, 1.2], 2.0, 0), "labels: expected whole numbers"),
    ],
)
def test_impossible_requests_are_refused_with_argument_and_value(divide, message):
    with pytest.raises(UserError, match=message):
        divide()


def test_a_request_that_no_draw_can_meet_ends(monkeypatch):
    monkeypatch.setattr(partition, "MAX_DRAWS", 20)
    monkeypatch.setattr(partition, "MAX_EQUAL_DRAWS", 20)
    with pytest.raises(UserError, match=r"alpha=0.0001: no draw in 20"):
        dirichlet_equal(LABELS, 10, 0.0001, 0)
    with pytest.raises(UserError, match=r"num_sites=40: no draw in 20"):
        concentration(LABELS[:50], 40, [0.01] * 5, 0.5, 0)


def test_a_small_concentration_that_needs_many_draws_gets_them():
    labels = np.repeat(np.arange(5), [300, 250, 203, 150, 100])
    assert np.bincount(dirichlet_equal(labels, 10, 0.05, 3)).max() == 101  # the 17,926th
