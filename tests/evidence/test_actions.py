"""What components note of how they act: in the log, as a frame, in the report; and results stay the same."""

import numpy as np
import pytest
import torch
from PIL import Image

import equipoise as eq
from equipoise.components.cpa import spread_of
from equipoise.contract.notes import Notes
from equipoise.report import write_report
from harness import events, run_tiny


def acted(folder, *settings):
    run_tiny(folder, *settings)
    return eq.load_result(folder).actions()


def test_prr_tells_its_steps_weights_and_the_spread_of_prototypes(tmp_path):
    told = acted(tmp_path / "run", "prr", "train.epochs=3", "prr.warmup=0")
    steps = told[told["name"] == "step"]
    assert (
        set(steps["place"]) == {1, 2, 3} and set(steps["value"]) <= {1, 2, 3} and (steps["component"] == "deputy").all()
    )
    assert (steps[steps["place"] == 1]["value"] == 1).all(), "a round begins with recovering"
    weights = told[told["name"] == "weight"]
    assert set(weights["class"]) == set(eq.load_result(tmp_path / "run").classes) and set(weights["site"]) == {
        f"site {number}" for number in (1, 2, 3)
    }
    spread = told[told["name"] == "prototype_spread"]
    assert (spread["value"] >= 0).all() and set(spread["site"]) == {""}
    page = write_report([tmp_path / "run"]).read_text()
    assert "How the method acted" in page and "prototype_spread" in page


def test_fediic_tells_margins_and_difficulties(tmp_path):
    told = acted(tmp_path / "run", "fediic")
    assert {"margin", "difficulty"} <= set(told["name"])
    assert (told[told["name"] == "difficulty"]["value"] >= 0).all()


def test_npr_tells_how_many_images_lie_near_each_sub_cluster(tmp_path):
    told = acted(tmp_path / "run", "fednpr")
    sizes = told[(told["name"] == "nearest_images") & (told["round"] == 1)]
    start = events(tmp_path / "run", "start")[0]
    for site in start["sites"]:
        own = sizes[sizes["site"] == site["name"]].groupby("class", sort=False)["value"].sum()
        assert own.tolist() == site["train"]


def test_climb_tells_dual_variables_of_every_site(tmp_path):
    told = acted(tmp_path / "run", "climb")
    duals = told[told["name"] == "dual"]
    assert set(duals["site"]) == {"site 1", "site 2", "site 3"} and (duals["value"] >= 0).all()


def test_fedbm_tells_its_generators_loss_and_shows_its_images(tmp_path):
    told = acted(tmp_path / "run", "fedbm", "fedbm.every=1", "fedbm.generator_steps=2", "fedbm.generator_batch=8",
                 "fedbm.generator_width=4", "fedbm.synthetic=4")  # fmt: skip
    assert len(told[told["name"] == "loss"]) == 1
    pictures = [*(tmp_path / "run" / "pictures").glob("*.png")]
    assert [path.name for path in pictures] == ["generated-round00001.png"]
    assert Image.open(pictures[0]).size == (8 * 16, 4 * 16)


@pytest.mark.slow
def test_workers_note_the_same(tmp_path):
    alone = acted(tmp_path / "alone", "fediic")
    together = acted(tmp_path / "together", "fediic", "compute.workers=2")
    assert alone.equals(together)


def test_a_method_that_notes_nothing_logs_nothing(tmp_path):
    assert acted(tmp_path / "run", "fedavg").empty
    assert not events(tmp_path / "run", "actions")


def test_the_spread_of_prototypes_is_their_distance_from_the_mean():
    local = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]], [[9.0, 9.0]]])
    present = torch.tensor([[True], [True], [False]])
    assert spread_of(local, present).tolist() == [1.0]


def test_a_note_is_small():
    with pytest.raises(TypeError, match="5000 numbers"):
        Notes().add("weights", torch.zeros(5000))
    notes = Notes()
    notes.add("x", torch.tensor([1.23456, np.nan]))
    assert notes.taken()["x"][0][0] == 1.235 and not notes.taken()
