"""Splits keep groups together and class shares apart from rounding; leaks are counted."""

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.data import splits
from equipoise.data.splits import (
    PARTS,
    apportion,
    count_leaks,
    grouped_split,
    part_targets,
    permuted_split,
    stratified_sample,
    whole_sites,
)

RATIOS = (0.7, 0.1, 0.2)

samples = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=120)


def counts_by_part(labels: np.ndarray, parts: np.ndarray) -> np.ndarray:
    return np.array([np.bincount(labels[parts == part], minlength=labels.max() + 1) for part in splits.PARTS])


@given(samples, st.integers(0, 5))
def test_no_group_is_in_two_parts(pairs, seed):
    labels, groups = np.array(pairs).T
    parts = grouped_split(labels, groups.astype(str), RATIOS, seed)
    for group in np.unique(groups):
        assert len(set(parts[groups == group])) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(0, 5))
def test_single_samples_meet_the_targets_of_every_class_exactly(labels, seed):
    labels = np.array(labels)
    parts = grouped_split(labels, np.arange(len(labels)).astype(str), RATIOS, seed)
    targets = np.array([part_targets(count, RATIOS) for count in np.bincount(labels)]).T
    assert (counts_by_part(labels, parts) == targets).all()


def test_large_groups_still_leave_class_shares_within_one_percent():
    rng = np.random.default_rng(0)
    group_label = rng.choice(3, 800, p=(0.8, 0.15, 0.05))
    members = np.repeat(np.arange(800), rng.integers(1, 7, 800))
    labels = group_label[members]
    shares = counts_by_part(labels, grouped_split(labels, members.astype(str), RATIOS, 0)) / np.bincount(labels)
    assert np.abs(shares - np.array(RATIOS)[:, None]).max() < 0.01


def test_the_same_seed_gives_the_same_split_and_another_seed_another():
    labels, groups = np.repeat([0, 1], 50), np.arange(100).astype(str)
    first = grouped_split(labels, groups, RATIOS, 1)
    assert (first == grouped_split(labels, groups, RATIOS, 1)).all()
    assert (first != grouped_split(labels, groups, RATIOS, 2)).any()


def test_a_class_with_three_samples_is_in_every_part_and_a_single_one_trains():
    assert part_targets(3, RATIOS) == (1, 1, 1)
    assert part_targets(2, RATIOS) == (1, 0, 1)
    assert part_targets(1, RATIOS) == (1, 0, 0)
    assert part_targets(0, RATIOS) == (0, 0, 0)
    assert part_targets(100, (0.9, 0.1, 0)) == (90, 10, 0)


def test_parts_that_round_up_leave_no_less_than_nothing():
    assert part_targets(17, (0, 0.1, 0.3)) == (0, 5, 12)


@given(st.integers(4, 40), st.tuples(*[st.floats(0.01, 1)] * 3))
def test_a_class_with_more_samples_than_parts_is_in_every_part(count, ratios):
    targets = part_targets(count, ratios)
    assert sum(targets) == count and min(targets) >= 1


def test_leaks_are_counted_in_groups():
    assert doctest.testmod(splits).failed == 0
    assert count_leaks({"train": ["a", "a"], "valid": ["b"], "test": ["c"]}) is None
    assert count_leaks({"train": ["a"], "test": ["a", "a"]}) == "1 of 1 test groups are also in train"
    assert count_leaks({"train": ["a"], "valid": ["a", "b"]}) == "1 of 2 valid groups are also in train"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any), st.integers(0, 300))
def test_apportion_sums_to_the_total_and_spares_no_one_it_can_serve(weights, total):
    weights = np.array(weights)
    numbers = apportion(weights, total)
    assert numbers.sum() == total
    assert (numbers[weights == 0] == 0).all()
    if total >= np.count_nonzero(weights):
        assert (numbers[weights > 0] >= 1).all()


@given(st.lists(st.integers(0, 3), max_size=100), st.integers(1, 60))
def test_a_stratified_sample_keeps_every_class_it_has_room_for(labels, count):
    labels = np.array(labels, dtype=np.int64)
    kept = stratified_sample(labels, count, seed=0)
    assert len(kept) == min(count, len(labels))
    assert (np.diff(kept) > 0).all()
    if count >= len(set(labels)):
        assert set(labels[kept]) == set(labels)


@given(st.integers(1, 60), st.integers(0, 5))
def test_whole_sites_are_drawn_once_and_keep_the_shares(count, seed):
    names = [f"site {number}" for number in range(60)]
    drawn = whole_sites(names, (0.7, 0.1, 0.2), count, seed)
    assert len(drawn) == count and set(drawn) <= set(names)
    assert [list(drawn.values()).count(part) for part in PARTS] == list(part_targets(count, (0.7, 0.1, 0.2)))


def test_a_permuted_split_is_cut_where_numpys_shares_are_cut():
    for count in (10, 101, 25_331, 67_969):
        parts = permuted_split(count, (0.7, 0.1, 0.2))
        ends = int(0.7 * count), int(0.8 * count)
        assert [int((parts == part).sum()) for part in PARTS] == [ends[0], ends[1] - ends[0], count - ends[1]]
