"""How tests compare numbers: against golden values at 2e-5 relative, and gradients beside values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def assert_close(actual: Tensor, expected: Tensor | float, tolerance: float = 2e-5) -> None:
    """Equal shapes, and no entry further off than `tolerance` times the largest entry expected."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    finite = expected[expected.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    torch.testing.assert_close(actual.detach().double(), expected, rtol=0, atol=tolerance * scale)


def gradient(function: Callable[[Tensor], Tensor], argument: Tensor) -> Tensor:
    """The gradient of a scalar function of one tensor."""
    variable = argument.detach().clone().requires_grad_()
    return torch.autograd.grad(function(variable), variable)[0]


def assert_golden(function: Callable[[Tensor], Tensor], argument: Tensor, value: Tensor, slope: Tensor) -> None:
    """The function has this value and this gradient at the argument."""
    assert_close(function(argument), value)
    assert_close(gradient(function, argument), slope)


def assert_alike(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Nested values are equal; numbers differ by a small share of themselves at most."""
    if isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys()
        for key in expected:
            assert_alike(found[key], expected[key], tolerance)
    elif isinstance(expected, list):
        assert isinstance(found, list)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other, tolerance)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, nan_ok=True)
    else:
        assert found == expected
