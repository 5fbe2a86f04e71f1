"""Several methods on the same data: a grid of runs with seeds, and its table of means, intervals and tests."""

from __future__ import annotations


class Comparison:
    pass


def compare() -> Comparison:
    raise NotImplementedError
