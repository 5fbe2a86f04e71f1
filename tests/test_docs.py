"""Figures in the documentation are those of the files that benchmarks and studies wrote from their logs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from closeness import assert_alike
from equipoise.report import read_run
from equipoise.studies.archive import unpack

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> dict:
    """`benchmarks/pages.py`, which writes the figures into the pages."""
    return runpy.run_path(str(ROOT / "benchmarks" / "pages.py"))


@pytest.fixture(scope="module")
def blocks(script) -> dict[str, str]:
    return script["blocks"]()


def test_pages_have_the_figures_of_the_results(script, blocks):
    for path in script["pages"]():
        page = path.read_text(encoding="utf-8")
        assert script["filled"](page, blocks) == page, f"{path.name}: run python benchmarks/pages.py"


def test_every_block_stands_in_a_page(script, blocks):
    pages = " ".join(path.read_text(encoding="utf-8") for path in script["pages"]())
    assert len(blocks) > 20 and not [name for name in blocks if f"<!-- generated: {name} -->" not in pages]


def test_what_stands_in_a_block_is_replaced_and_the_rest_of_a_page_stays(script):
    page = "before\n<!-- generated: a -->\n| 1.0 |\n<!-- end -->\nbetween\n<!-- generated: b -->\n<!-- end -->\nafter\n"
    filled = script["filled"](page, {"a": "| 2.0 |", "b": "3"})
    expected = page.replace("1.0", "2.0").replace("b -->\n", "b -->\n3\n")
    assert filled == expected and script["filled"](filled, {"a": "| 2.0 |", "b": "3"}) == filled


def test_what_is_said_of_drawn_sites_follows_from_the_events_of_the_runs():
    study = ROOT / "results" / "fedbm-pbc-0.05"
    holders = runpy.run_path(str(ROOT / "benchmarks" / "holders.py"))["holders"]
    known = json.loads((study / "controls.json").read_text())
    for run in known["runs"]:
        assert holders(read_run(unpack(study) / run["name"]), known["first_round"]) == run


@pytest.mark.parametrize("study", ["fedbm-ham10000-0.05", "fedbm-pbc-0.05"])
def test_rounds_of_the_released_rule_follow_from_the_events_of_the_runs(study):
    folder = ROOT / "results" / study
    rounds = runpy.run_path(str(ROOT / "benchmarks" / "released_rule.py"))["rounds"]
    known = json.loads((folder / "released_rule.json").read_text())["runs"]
    assert len(known) == len(list(unpack(folder).iterdir()))
    assert all(rounds(read_run(folder / "runs" / run["name"])) == run for run in known)


@pytest.mark.parametrize("study", ["prr-dermoscopy", "fedbm-tuning-pbc"])
def test_the_summary_of_a_study_follows_from_the_events_of_its_runs(study):
    from equipoise.studies import load_study
    from equipoise.studies.results import collect
    from equipoise.studies.study_files import summary

    folder = ROOT / "results" / study
    written = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    found = json.loads(json.dumps(summary(collect(load_study(study), folder))))
    assert found["rule"] == written["rule"] and found["mean_ranks"] == written["mean_ranks"]
    for part in ("rows", "tests"):
        assert_alike(found[part], written[part])
