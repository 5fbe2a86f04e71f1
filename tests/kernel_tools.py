"""Where kernels of our own are tested: on a GPU, or in Triton's interpreter; elsewhere their tests are skipped."""

import os
from types import SimpleNamespace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def require_triton() -> None:
    """Skip the test where kernels cannot run."""
    pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without a GPU, set TRITON_INTERPRET=1")


def loaded(kernels):
    """A module of kernels, where kernels can run."""
    require_triton()
    return kernels.module


def stand_in(monkeypatch, kernels, **functions):
    """Put a proven module of these functions in the place of kernels."""
    monkeypatch.setattr(kernels, "proven", True)
    module = SimpleNamespace(**{name: SimpleNamespace(apply=function) for name, function in functions.items()})
    monkeypatch.setitem(vars(kernels), "module", module)
    return module


def random_images(shape, dtype=torch.float32, offset=0.0):
    """Random images (B, C, H, W) about some value, channels last."""
    torch.manual_seed(0)
    return (torch.randn(shape, device=DEVICE) + offset).to(dtype).contiguous(memory_format=torch.channels_last)


def fake_images(size=(2, 8, 4, 4), device="cuda", dtype=torch.bfloat16, memory_format=torch.channels_last):
    """Images without values, which say that they lie on a GPU: inside `FakeTensorMode`."""
    return torch.empty(size, device=device, dtype=dtype, memory_format=memory_format)


#: what images must be for any of the kernels, and what they may not be
FITTING = [
    ({}, True),
    ({"device": "cpu"}, False),
    ({"dtype": torch.float32}, False),
    ({"memory_format": torch.contiguous_format}, False),
]
