"""Checks of arguments that several pure functions share."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.errors import UserError


def check_choice(argument: str, value: str, known: Collection[str]) -> None:
    """Refuse a `value` of `argument` that is not one of the `known` names."""
    if value not in known:
        raise UserError(f"{argument}={value!r} is not known; choose one of {', '.join(sorted(known))}")


def check_shape(argument: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Refuse a tensor of another shape, which broadcasting would take without a word."""
    if tuple(shape) != tuple(expected):
        raise UserError(f"{argument} has the shape {tuple(shape)}, expected {tuple(expected)}")


def whole_numbers(argument: str, values: ArrayLike) -> NDArray[np.int64]:
    """Whole numbers (n,), of any number type; other values are refused."""
    given = np.asarray(values).ravel()
    if not given.size:
        return np.empty(0, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        numbers = given.astype(np.int64) if given.dtype.kind in "iubf" else None
    if numbers is None or not np.array_equal(numbers, given):
        raise UserError(f"{argument}: expected whole numbers, not {given[:3].tolist()} ... of type {given.dtype}")
    return numbers
