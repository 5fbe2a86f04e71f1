"""Each line of the threat model names tests that there are, or states that nothing prevents the attack."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "threats.md"


def attacks() -> list[list[str]]:
    """The rows of the page's tables of attacks, as cells."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in row] for row in rows]
    heads = [row for row in found if row[-1] == "shown by"]
    assert len(heads) == 8
    return [row for row in found[8:] if row not in heads and len(row) == 3]


@pytest.mark.parametrize("row", attacks(), ids=lambda row: row[0])
def test_each_line_names_a_test_or_states_that_nothing_prevents_it(row):
    _, outcome, shown = row
    assert bool(shown) != ("Nothing prevents" in outcome)
    for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", shown):
        names = {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert test in names, f"{file} has no {test}"
    assert not shown or re.fullmatch(r"`[\w/]+\.py::\w+`(, `[\w/]+\.py::\w+`)*", shown)
