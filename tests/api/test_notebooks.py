"""The notebooks in examples/ run from the first cell to the last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    content = json.loads(notebook.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in content["cells"]), "outputs are not kept: they grow old"
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells, start=1):
        exec(compile(cell, f"{notebook.name}, code cell {number}", "exec"), names)
    assert list(tmp_path.rglob("report.html"))
