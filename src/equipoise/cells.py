"""Confusion matrices as logs hold them: rows of numbers, or of many classes only the cells that are not zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: logs hold matrices of more classes than this by their cells
MOST_DENSE = 64

#: rows, or {"size": C, "rows": [...], "columns": [...], "counts": [...]}
Matrix = list[list[float]] | dict[str, Any]


def compact(matrix: ArrayLike) -> Matrix:
    """A matrix (C, C) as plain values, with no more numbers than needed."""
    array = np.asarray(matrix)
    if len(array) <= MOST_DENSE:
        return array.tolist()
    rows, columns = array.nonzero()
    counts = array[rows, columns].tolist()
    return {"size": len(array), "rows": rows.tolist(), "columns": columns.tolist(), "counts": counts}


def dense(value: Matrix) -> NDArray[Any]:
    """The matrix (C, C) that plain values stand for."""
    if not isinstance(value, Mapping):
        return np.array(value)
    return added([value])


def added(values: Sequence[Matrix]) -> NDArray[Any]:
    """The sum of matrices; of those with many classes only the cells are touched."""
    if not all(isinstance(value, Mapping) for value in values):
        return np.sum([dense(value) for value in values], axis=0)
    first: Any = values[0]
    counts = [np.asarray(value["counts"]) for value in values]  # type: ignore[call-overload]
    total = np.zeros((first["size"], first["size"]), np.result_type(np.int64, *{c.dtype for c in counts if c.size}))
    for value, own in zip(values, counts):
        places = (np.asarray(value[key], np.int64) for key in ("rows", "columns"))  # type: ignore[call-overload]
        total[tuple(places)] += own.astype(total.dtype)
    return total
