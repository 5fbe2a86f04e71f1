"""The package as it was at another commit, so that a benchmark can run both in turns on one machine."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def sources(before: str) -> Iterator[dict[str, Path]]:
    """The folders to import the package from: `after`, this tree's, and `before`, if a commit is named."""
    found = {"after": ROOT / "src"}
    if not before:
        yield found
        return
    packed = subprocess.run(["git", "archive", before, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield {"before": Path(folder) / "src", **found}


def environment(source: Path) -> dict[str, str]:
    """The environment of a process of one thread that imports the package from a folder."""
    own = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "0"}
    return {**os.environ, **own}
