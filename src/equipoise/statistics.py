"""Statistics of a study: mean and deviation over seeds, paired tests against the best row, ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from equipoise.metrics import holm, paired_t_test, wilcoxon_test

#: fewer pairs than this are no sample
FEWEST_PAIRS = 3
#: scores, in per cent, that differ by no more than this are equal: what is left is rounding
ROUNDING = 1e-9


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None for one value) and number of values."""

    mean: float
    std: float | None
    n: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that are known; None when none is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Comparison:
    """The best row against another one on the results that both have; p-values as they are and Holm-corrected.

    There is no p-value where all differences are one and the same: they have no spread to be judged by.
    """

    best: str
    other: str
    pairs: int
    difference: float
    t_test: float | None
    wilcoxon: float | None
    t_test_holm: float | None
    wilcoxon_holm: float | None


def compare_with_best(values: Mapping[str, Mapping[Hashable, float]], higher: bool = True) -> list[Comparison]:
    """Paired tests between the best row and each other one, over the keys (seeds, say) that both have.

    The best is that of the highest mean (the lowest, if not `higher`) among rows with enough results to be tested, over
    the keys that all of these have, if there are enough. Rows with too few pairs are left out. Holm's correction is
    over the tests made, for each kind apart.
    """
    testable = {name: own for name, own in values.items() if len(own) >= FEWEST_PAIRS}
    if len(testable) < 2:
        return []
    choose = max if higher else min
    common = set.intersection(*(set(own) for own in testable.values()))
    judged = common if len(common) >= FEWEST_PAIRS else set.union(*(set(own) for own in testable.values()))
    means = {name: float(np.mean([own[key] for key in own if key in judged])) for name, own in testable.items()}
    best = choose(means, key=means.__getitem__)
    found: list[tuple[str, int, float]] = []
    t_tests: list[float] = []
    wilcoxons: list[float] = []
    for other, own in testable.items():
        keys = [key for key in testable[best] if key in own]
        if other == best or len(keys) < FEWEST_PAIRS:
            continue
        gaps = np.array([testable[best][key] - own[key] for key in keys])
        found.append((other, len(keys), float(gaps.mean())))
        t_test, wilcoxon = _p_values(gaps)
        t_tests.append(t_test)
        wilcoxons.append(wilcoxon)
    columns = (t_tests, wilcoxons, holm(t_tests), holm(wilcoxons))
    p_values = zip(*([None if math.isnan(p) else p for p in column] for column in columns))
    return [Comparison(best, *entry, *own) for entry, own in zip(found, p_values)]


def _p_values(gaps: NDArray[np.float64]) -> tuple[float, float]:
    """P-values of the paired t-test and Wilcoxon's test; nan where all differences are the same, but not zero."""
    gaps = np.where(np.abs(gaps) <= ROUNDING, 0.0, gaps)
    if gaps.any() and np.ptp(gaps) <= ROUNDING:
        return math.nan, math.nan
    nothing = [0.0] * len(gaps)
    return paired_t_test(gaps.tolist(), nothing), wilcoxon_test(gaps.tolist(), nothing)


@dataclass(frozen=True)
class Ranking:
    """Rank of each row (1 is best, ties share the mean) in every block, and the blocks that rows without ranks lack."""

    ranks: dict[str, dict[str, float]]
    lacking: dict[str, list[str]]

    @property
    def means(self) -> dict[str, float]:
        """The mean rank of each row."""
        return {name: sum(own.values()) / len(own) for name, own in self.ranks.items()}


def ranking(values: Mapping[str, Mapping[str, float]], higher: bool = True) -> Ranking:
    """Rank rows in every block (a data set, say) that any has a value for; rows that lack a block get no ranks."""
    blocks = list(dict.fromkeys(block for own in values.values() for block in own))
    lacking = {name: [block for block in blocks if block not in own] for name, own in values.items()}
    kept = [name for name in values if blocks and not lacking[name]]
    table = np.array([[values[name][block] for block in blocks] for name in kept]).reshape(len(kept), len(blocks))
    rounded = np.round(table / ROUNDING)
    ranked = rankdata(-rounded if higher else rounded, axis=0).tolist() if kept else []
    ranks = {name: dict(zip(blocks, own)) for name, own in zip(kept, ranked)}
    return Ranking(ranks, {name: missed for name, missed in lacking.items() if missed})
