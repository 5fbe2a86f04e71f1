"""What several tests share: the golden numbers, and real images where they are at hand."""

import os
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
# The same examples in every run: a failure is of the code, not of the day.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")
GOLDEN = Path(__file__).parent / "golden"


def load_golden(name: str) -> dict[str, torch.Tensor]:
    """The arrays of `tests/golden/<name>.npz` as tensors (strings stay numpy arrays)."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {
            key: value if value.dtype.kind in "USO" else torch.from_numpy(np.asarray(value))
            for key, value in ((key, arrays[key]) for key in arrays.files)
        }


@pytest.fixture
def golden():
    """The golden loader, as a fixture."""
    return load_golden


@pytest.fixture
def shared_data() -> Path:
    """The folder of public data sets that lies beside the repository on some machines."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("EQUIPOISE_SHARED", beside)) / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the public data sets in {folder.name}/ beside the repository (EQUIPOISE_SHARED)")
    return folder


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium by Playwright, for pages of reports."""
    from browsing import CHROMIUM

    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright to open pages")
    if CHROMIUM is None:
        pytest.skip("needs Chromium to open pages: apt-get install chromium")
    with playwright.sync_playwright() as tools:
        opened = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()
