"""A study of segmentation: its tables have the scores of masks, and its packed runs give the same ones."""

import shutil
import subprocess
import sys

import pandas as pd
import pytest

from equipoise.studies import load_study
from equipoise.studies.archive import pack
from equipoise.studies.results import collect
from equipoise.studies.study_files import to_csv, to_markdown

STUDY = """
name = "masks"
metrics = ["dice", "iou"]
seeds = [1, 2]

[settings]
data.phantom = { masks = true, images = 60, sites = 2, size = 16 }
train.rounds = 1
train.batch_size = 8
augment.name = "flips"

[[row]]
name = "fedavg"
method = "fedavg"
paper = { dice = 69.11 }

[[row]]
name = "fedbn"
method = "fedbn"
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    (folder / "masks.toml").write_text(STUDY)
    subprocess.run([sys.executable, "-m", "equipoise", "study", "masks.toml"], cwd=folder, check=True)
    return folder


def results_of(study):
    return collect(load_study(str(study / "masks.toml")), study / "studies" / "masks")


def test_tables_of_masks_have_dice_and_iou_and_the_papers_numbers(study):
    table = pd.read_csv(study / "studies" / "masks" / "table.csv")
    assert table["dice_paper"].tolist()[0] == 69.11
    assert table["dice"].between(0, 100).all() and table["iou"].lt(table["dice"] + 1e-9).all()
    assert "balanced_accuracy" not in table
    assert "| 69.11 |" in to_markdown(results_of(study))


def test_packed_runs_of_masks_give_the_same_tables(study):
    folder = study / "studies" / "masks"
    before = pd.read_csv(folder / "table.csv")
    pack(folder)
    shutil.rmtree(folder / "runs")
    (study / "again.csv").write_text(to_csv(results_of(study)))
    pd.testing.assert_frame_equal(pd.read_csv(study / "again.csv"), before, rtol=1e-4)
