"""Benchmarks run: each is tried with `--quick`, which takes seconds and writes its file elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
#: quick forms that take more than some seconds
SLOW = ("cpu", "flower", "gpu", "growth", "overhead", "presets", "spread")
NEEDS = re.compile(r'^NEEDS = "(.*)"$', re.MULTILINE)


def scripts() -> dict[str, str]:
    """The scripts of the folder by name, as text; other files are modules of theirs."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(BENCHMARKS.glob("*.py"))}
    return {name: text for name, text in texts.items() if "__main__" in text}


def tried(name: str, text: str) -> pytest.param:
    """A script as a case of the test below, with the reason why it is skipped, or slow."""
    needs = NEEDS.search(text)
    marks = [pytest.mark.skip(reason=f"{name} needs {needs[1]}")] if needs else []
    return pytest.param(name, marks=[*marks, *([pytest.mark.slow] if name in SLOW else [])])


@pytest.mark.parametrize("script", [tried(name, text) for name, text in scripts().items()])
def test_a_benchmark_runs_in_its_quick_form(script, tmp_path):
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / f"{script}.json").read_text())


def test_the_exponent_of_a_curve_is_that_of_its_power():
    place = importlib.util.spec_from_file_location("growth", BENCHMARKS / "growth.py")
    growth = importlib.util.module_from_spec(place)
    place.loader.exec_module(growth)
    for power in (0, 1, 2):
        assert growth.exponent([10, 100, 1000], [3.0 * size**power for size in (10, 100, 1000)]) == pytest.approx(power)
    assert growth.exponent([1, 10], [0.0, 1.0]) is None
