"""Statistics of a study: mean and deviation over seeds, paired tests against the best row, ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from equipoise.metrics import holm, paired_t_test, wilcoxon_test

#: fewer pairs than this are no sample
FEWEST_PAIRS = 3


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
    """The best row against another one on the results that both have; p-values as they are and Holm-corrected."""

    best: str
    other: str
    pairs: int
    difference: float
    t_test: float
    wilcoxon: float
    t_test_holm: float
    wilcoxon_holm: float


def compare_with_best(values: Mapping[str, Mapping[Hashable, float]], higher: bool = True) -> list[Comparison]:
    """Paired tests between the best row and each other one, over the keys (seeds, say) that both have.

    The best is that of the highest mean (the lowest, if not `higher`) among rows with enough results to be tested.
    Rows with too few pairs are left out. Holm's correction is over the comparisons made, for each test apart.
    """
    testable = {name: own for name, own in values.items() if len(own) >= FEWEST_PAIRS}
    if len(testable) < 2:
        return []
    choose = max if higher else min
    best = choose(testable, key=lambda name: float(np.mean(list(testable[name].values()))))
    found: list[tuple[str, int, float]] = []
    t_tests, wilcoxons = [], []
    for other, own in testable.items():
        keys = [key for key in testable[best] if key in own]
        if other == best or len(keys) < FEWEST_PAIRS:
            continue
        first, second = ([each[key] for key in keys] for each in (testable[best], own))
        found.append((other, len(keys), float(np.mean(first) - np.mean(second))))
        t_tests.append(paired_t_test(first, second))
        wilcoxons.append(wilcoxon_test(first, second))
    p_values = zip(t_tests, wilcoxons, holm(t_tests), holm(wilcoxons))
    return [Comparison(best, *entry, *own) for entry, own in zip(found, p_values)]


def ranks(values: Mapping[str, Mapping[Hashable, float]], higher: bool = True) -> dict[str, dict[Hashable, float]]:
    """Rank of each row (1 is best, ties share the mean) in every block that all rows have a value for."""
    if not values:
        return {}
    blocks = [block for block in next(iter(values.values())) if all(block in own for own in values.values())]
    table = np.array([[own[block] for block in blocks] for own in values.values()]).reshape(len(values), len(blocks))
    ranked = rankdata(-table if higher else table, axis=0)
    return {name: dict(zip(blocks, row)) for name, row in zip(values, ranked.tolist())}
