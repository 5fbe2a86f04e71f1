"""Checks of arguments that several pure functions share."""

from collections.abc import Collection, Sequence

from equipoise.errors import UserError


def check_choice(argument: str, value: str, known: Collection[str]) -> None:
    """Refuse a `value` of `argument` that is not one of the `known` names."""
    if value not in known:
        raise UserError(f"{argument}={value!r} is not known; choose one of {', '.join(sorted(known))}")


def check_shape(argument: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Refuse a tensor of another shape, which broadcasting would take without a word."""
    if tuple(shape) != tuple(expected):
        raise UserError(f"{argument} has the shape {tuple(shape)}, expected {tuple(expected)}")
