"""Splits into training, validation and test parts that keep class shares and keep each group in one part.

A group is what must not be seen twice: the images of one lesion, or of one patient.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

PARTS = ("train", "valid", "test")
#: why several labels of one image are refused
MULTI_LABEL = "Multi-label data is not supported: give one label for each image, or masks for structures within it."


def grouped_split(
    strata: np.ndarray, groups: Sequence[str] | np.ndarray, ratios: Sequence[float], seed: int
) -> np.ndarray:
    """Share samples out to parts so that no group is in two of them and every stratum keeps its shares.

    Large groups go first, each to the part with most room left for it; the many small ones then fill the gaps.
    With groups of one sample the counts of `part_targets` are met exactly.

    Args:
        strata: int64 (n,), the class of each sample, or a number for its site and class
        groups: (n,) name of each sample's group
        ratios: shares of the parts "train", "valid" and "test"

    Returns:
        the part of each sample, as strings (n,)
    """
    _, stratum = np.unique(np.asarray(strata), return_inverse=True)
    need = np.array([part_targets(count, ratios) for count in np.bincount(stratum)], dtype=float).T
    return np.array(PARTS)[_shared_out(stratum, groups, need, seed)]


def grouped_folds(strata: np.ndarray, groups: Sequence[str] | np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Share samples out to folds of about equal size: no group is in two of them, and every stratum keeps its shares.

    Args:
        strata, groups: (n,) as for `grouped_split`

    Returns:
        the fold of each sample, from 0 on, (n,)
    """
    _, stratum = np.unique(np.asarray(strata), return_inverse=True)
    counts = np.bincount(stratum)
    rank = (np.arange(folds)[:, None] + np.arange(len(counts))) % folds  # the remainder goes to folds in turn
    need = (counts // folds + (rank < counts % folds)).astype(float)
    return _shared_out(stratum, groups, need, seed)


def _shared_out(stratum: np.ndarray, groups: Sequence[str] | np.ndarray, need: np.ndarray, seed: int) -> np.ndarray:
    """The part (n,) of each sample, where part p needs `need[p, s]` samples of stratum s, and groups stay whole."""
    _, member, sizes = np.unique(np.asarray(groups, dtype=str), return_inverse=True, return_counts=True)
    scale = np.maximum(need, 1e-9)
    samples = np.split(np.argsort(member, kind="stable"), np.cumsum(sizes)[:-1])
    shuffled = np.random.default_rng(seed).permutation(len(sizes))
    parts = np.zeros(len(stratum), dtype=np.int64)
    for group in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        touched, counts = np.unique(stratum[samples[group]], return_counts=True)
        room = ((need[:, touched] - counts) / scale[:, touched]) @ counts
        part = int(np.argmax(room))
        need[part, touched] -= counts
        parts[samples[group]] = part
    return parts


def part_targets(count: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """How many of `count` samples of one class go to each part.

    Validation and test are rounded up, so that a class with enough samples is in every part. With fewer samples than
    parts, training comes first, then test.
    """
    wanted = [part for part in (0, 2, 1) if ratios[part] > 0]
    if count <= len(wanted):
        return tuple(int(part in wanted[:count]) for part in range(len(PARTS)))
    valid, test = (math.ceil(share * count / sum(ratios) - 1e-9) for share in ratios[1:])
    while valid + test > count - (ratios[0] > 0):  # both were rounded up, and nothing is left to train on
        valid, test = (valid - 1, test) if valid > test else (valid, test - 1)
    return count - valid - test, valid, test


def whole_sites(names: Sequence[str], ratios: Sequence[float], count: int, seed: int) -> dict[str, str]:
    """Draw `count` of the sites, and give each of them a part as a whole: {site: part}.

    >>> sorted(whole_sites("abcdefghijkl", (0.7, 0.1, 0.2), 10, seed=0).values())
    ['test', 'test', 'train', 'train', 'train', 'train', 'train', 'train', 'train', 'valid']
    """
    drawn = np.random.default_rng(seed).permutation(len(names))[:count]
    parts = np.repeat(PARTS, part_targets(count, ratios))
    return {names[site]: str(part) for site, part in zip(drawn, parts)}


def permuted_split(count: int, ratios: Sequence[float], seed: int = 0) -> np.ndarray:
    """FedIIC's split: one permutation of all samples, cut at the shares; (n,) strings, neither stratified nor grouped.

    The authors draw it by `numpy.random.seed(0)` in the order of their list.
    """
    order = np.random.RandomState(seed).permutation(count)
    ends = [int(share * count) for share in np.round(np.cumsum(ratios[:2]), 9)]
    parts = np.empty(count, dtype="<U5")
    for part, chosen in zip(PARTS, np.split(order, ends)):
        parts[chosen] = part
    return parts


#: how every warning of groups (patients, lesions) that lie in two parts of a split words it
SHARED = "groups are also in"


def count_leaks(groups_by_part: Mapping[str, Collection[str]]) -> str | None:
    """Say how many groups of a later part are also in an earlier one, or None when no group is.

    >>> count_leaks({"train": ["a", "b"], "valid": ["c"], "test": ["b", "c", "d"]})
    '1 of 3 test groups are also in train; 2 of 3 test groups are also in train or valid'
    """
    train, valid, test = (set(groups_by_part.get(part, ())) for part in PARTS)
    messages = []
    if test & train:
        messages.append(f"{len(test & train)} of {len(test)} test {SHARED} train")
    if test & (valid - train):
        both = train | valid
        messages.append(f"{len(test & both)} of {len(test)} test {SHARED} train or valid")
    if valid & train:
        messages.append(f"{len(valid & train)} of {len(valid)} valid {SHARED} train")
    return "; ".join(messages) or None


def stratified_sample(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Ascending positions of at most `count` samples that keep class shares, if possible one of each class."""
    if len(labels) <= count:
        return np.arange(len(labels))
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    sizes = np.bincount(labels)
    each = (sizes > 0).astype(np.int64) * int(count >= (sizes > 0).sum())
    # Shares of each class's remainder never exceed the remainder.
    quota = each + _largest_remainders(sizes - each, count - int(each.sum()))
    kept = [shuffled[labels[shuffled] == label][:number] for label, number in enumerate(quota)]
    return np.sort(np.concatenate(kept))


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers (n,) that sum to `total` in proportion to `weights` (n,), by largest remainders.

    Where `total` allows it, every positive weight gets at least one.
    """
    positive = np.asarray(weights) > 0
    floor = positive.astype(np.int64) * int(total >= positive.sum())
    return floor + _largest_remainders(weights, total - int(floor.sum()))


def _largest_remainders(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers (n,) that sum to `total` in proportion to `weights` (n,)."""
    exact = weights / max(np.sum(weights), 1e-300) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts
