"""Benchmarks run: each is tried with `--quick`, which takes seconds and writes its file elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.parametrize("script", ["pfa", "start", "before_and_after"])
def test_a_benchmark_runs_in_its_quick_form(script, tmp_path):
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / f"{script}.json").read_text())
