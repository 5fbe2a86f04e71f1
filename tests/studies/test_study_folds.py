"""Studies over folds and over sites that are left out."""

import json

import pytest

from equipoise.core.errors import UserError
from equipoise.core.validation import validated
from equipoise.report.record import read_run
from equipoise.studies.grid import cell_config, grid, known_cells
from equipoise.studies.results import collect
from equipoise.studies.runner import run_grid
from equipoise.studies.study_file import StudyConfig
from equipoise.studies.study_files import write_study
from harness import TINY


def study(**more):
    settings = {}
    for text in TINY:
        key, _, value = text.partition("=")
        settings[key] = value.strip("'") if "'" in value else int(value)
    settings |= {"train.rounds": 1}
    nested = {}
    for key, value in settings.items():
        table = nested
        *path, last = key.split(".")
        for name in path:
            table = table.setdefault(name, {})
        table[last] = value
    rows = [{"name": "plain", "method": "fedavg"}, {"name": "alone", "method": "local"}]
    return validated(StudyConfig, {"name": "tiny", "settings": nested, "row": rows} | more, "study")


class Silent:
    def __getattr__(self, name):
        return lambda *values, **more: None


def finished(config, folder):
    planned = [(cell, cell_config(config, cell)) for cell in grid(config, folder)]
    from rich.console import Console

    from equipoise.api.grid_progress import GridProgress

    with GridProgress(Console(quiet=True), planned) as display:
        run_grid(planned, display, 1).complain()
    results = collect(config, folder)
    write_study(results, folder)
    return results, json.loads((folder / "summary.json").read_text())


def test_a_row_is_the_mean_over_its_folds_with_an_interval_over_all_images(tmp_path):
    config = study(folds=2, row=[{"name": "plain", "method": "fedavg"}])
    results, summary = finished(config, tmp_path)
    assert len(results.runs) == 2 and len(known_cells(config, tmp_path)) == 2
    assert {run.start.config["data"]["fold"] for run in results.runs} == {0, 1}
    for row, told in zip(results.rows, summary["rows"]):
        assert told["seeds"] == [1] and told["macro_f1"]["n"] == 1
        by_run = [
            read_run(run.cell.folder).finals.query(f"scope == 'mean' and view == '{row.view}'")["macro_f1"].iloc[0]
            for run in row.runs
        ]
        assert told["macro_f1"]["mean"] == pytest.approx(100 * sum(by_run) / 2)
        assert told["intervals"].keys() == {*results.study.metrics}, "areas and calibration errors have intervals, too"
        for metric, bounds in told["intervals"].items():
            assert bounds["low"] <= told[metric]["mean"] <= bounds["high"]
    assert not results.strangers and not results.unfinished


def test_each_site_is_left_out_in_turn(tmp_path):
    config = study(leave_out=["site 1", "site 3"])
    results, summary = finished(config, tmp_path)
    assert results.data_names == ["without site 1", "without site 3"]
    cohorts = {row["data"]: [*row["cohorts"]] for row in summary["rows"]}
    assert cohorts == {"without site 1": ["site 1"], "without site 3": ["site 3"]}
    assert "mean of all sites' personal predictions" in (tmp_path / "table.md").read_text()


def test_a_single_fold_is_refused():
    with pytest.raises(UserError, match="two folds or more"):
        study(folds=1)
