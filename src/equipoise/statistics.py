"""Statistics of studies and reports: mean, deviation, intervals, paired tests and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from equipoise.core.errors import UserError
from equipoise.tallies import Floats

#: fewer pairs than this are no sample
FEWEST_PAIRS = 3
#: the p-value below which a difference is marked
SIGNIFICANT = 0.05
#: how sure an interval is
CONFIDENCE = 0.95
#: scores, in per cent, that differ by no more than this are equal: such differences are rounding errors
ROUNDING = 1e-9


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None for one value) and number of values."""

    mean: float
    std: float | None
    n: int

    @property
    def margin(self) -> float | None:
        """Half the width of the interval that holds the mean with 95 % confidence (Student's t); None for one value."""
        if self.std is None:
            return None
        from scipy.stats import t

        return float(t.ppf((1 + CONFIDENCE) / 2, self.n - 1)) * self.std / math.sqrt(self.n)


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that are known; None when none is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None, len(known))


def share_interval(found: ArrayLike, of: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's interval of shares, 95 %: (low, high), nan where there is nothing to count."""
    k, n = np.asarray(found, dtype=float), np.asarray(of, dtype=float)
    n = np.where(n > 0, n, np.nan)
    z = 1.959963984540054
    middle, half = k / n + z**2 / (2 * n), z * np.sqrt(k / n * (1 - k / n) / n + (z / (2 * n)) ** 2)
    return (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)


def weighted_interval(found: ArrayLike, of: ArrayLike, weights: ArrayLike) -> tuple[float, float, float]:
    """A weighted sum of independent shares, and its interval (low, value, high) by MOVER from Wilson's intervals.

    Zou & Donner, Construction of confidence limits about effect measures, Statistics in Medicine 2008. Balanced
    accuracy is such a sum: each class's recall has the weight 1 / C.
    """
    k, n, w = (np.asarray(each, dtype=float) for each in (found, of, weights))
    low, high = share_interval(k, n)
    value = float((w * k / n).sum())
    below, above = (float(np.sqrt(((w * (k / n - end)) ** 2).sum())) for end in (low, high))
    return value - below, value, value + above


@dataclass(frozen=True)
class Comparison:
    """The best row against another one on the results that both have; p-values, raw and Holm-corrected.

    There is no p-value if all differences are equal: the test needs their spread.
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
    table = _table(values)
    table = table.loc[:, table.count() >= FEWEST_PAIRS]
    if table.shape[1] < 2:
        return []
    common = table.dropna()
    means = (common if len(common) >= FEWEST_PAIRS else table).mean()
    best = str(means.idxmax() if higher else means.idxmin())
    gaps = {name: (table[best] - own).dropna().to_numpy() for name, own in table.items() if name != best}
    gaps = {name: own for name, own in gaps.items() if len(own) >= FEWEST_PAIRS}
    tests = [_p_values(own) for own in gaps.values()]
    corrected = zip(*(holm(p_values) for p_values in zip(*tests)))
    return [
        Comparison(best, str(name), len(own), float(own.mean()), *(None if math.isnan(p) else p for p in (*raw, *more)))
        for (name, own), raw, more in zip(gaps.items(), tests, corrected)
    ]


def _p_values(gaps: np.ndarray) -> tuple[float, float]:
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
    table = _table(values)
    complete = table.dropna(axis=1)
    ranks = (complete / ROUNDING).round().rank(axis=1, ascending=not higher)
    lacking = {name: table.index[own.isna()].tolist() for name, own in table.items() if own.hasnans}
    return Ranking(ranks.to_dict() if len(table) else {}, lacking)


def _table(values: Mapping[str, Mapping[Any, float]]) -> pd.DataFrame:
    """A column per row of the study, a line per key in the order of first mention."""
    keys = list(dict.fromkeys(key for own in values.values() for key in own))
    return pd.DataFrame({name: [own.get(key) for key in keys] for name, own in values.items()}, keys, dtype=float)


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of equal means of paired results (over seeds, say); 1 where they do not differ."""
    from scipy.stats import ttest_1samp

    return _paired(first, second, lambda gaps: ttest_1samp(gaps, 0.0).pvalue)


def wilcoxon_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of the signed-rank test on paired results; 1 where they do not differ."""
    from scipy.stats import wilcoxon

    return _paired(first, second, lambda gaps: wilcoxon(gaps).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for several comparisons (Holm, 1979), in the order given; nan stays, uncounted."""
    corrected = np.array(p_values, dtype=np.float64)
    order = np.argsort(corrected)[: np.count_nonzero(~np.isnan(corrected))]
    steps = corrected[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return [float(p) for p in corrected]


def _paired(first: Sequence[float], second: Sequence[float], p_value: Callable[[Floats], float]) -> float:
    """The p-value of the paired differences: nan for fewer than two pairs, 1 where every difference is 0."""
    if len(first) != len(second):
        raise UserError(f"a paired test needs as many results of both kinds, not {len(first)} and {len(second)}")
    gaps = np.subtract(first, second, dtype=np.float64)
    if len(gaps) < 2:
        return float("nan")
    return float(p_value(gaps)) if gaps.any() else 1.0
