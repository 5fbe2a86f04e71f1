"""Scores made anew from predictions: equal to the logged ones, with intervals, by sub-groups."""

import numpy as np
import pandas as pd
import pytest

import equipoise as eq
from equipoise.engine.image_scores import UNKNOWN, banded
from equipoise.evidence.recomputed import read_predictions, scores_of
from harness import events, run_tiny

#: ways to choose and combine what is reported
WAYS = {
    "global": ("fedavg",),
    "personal": ("prr",),
    "both views": ("fedetf", "fedetf.turns=1", "fedetf.turn_epochs=1"),
    "own rounds": ("local", "evaluation.select='site'"),
    "several rounds": ("fedavg", "evaluation.rule='mean_last'", "evaluation.last=2"),
    "common set": ("prr", "data.phantom.common=true"),
    "FedBM's choice": ("fedavg", "evaluation.metric='fedbm_score'"),
}


@pytest.mark.parametrize("way", WAYS)
def test_scores_made_anew_equal_the_logged_ones_exactly(tmp_path, way):
    folder = run_tiny(tmp_path / "run", *WAYS[way])
    found = {(one.view, one.scope, one.site or None): one.summary for one in scores_of(read_predictions(folder))
             if one.split == "test"}  # fmt: skip
    compared = 0
    for event in events(folder, "final"):
        if event["view"] == "trained":
            continue
        again = found[event["view"], event["scope"], event["site"]]
        for name, value in event["metrics"].items():
            if name == "loss":  # a run sums it from logits
                assert again["metrics"][name] == pytest.approx(value, rel=1e-5)
            elif value is not None or way != "several rounds":  # there, a run has no pooled AUC
                assert again["metrics"][name] == value, (event["scope"], event["site"], name)
        assert again["recall"] == event["recall"] and again["n"] == event["n"]
        assert np.array_equal(again["confusion"], event["confusion"]) or event["scope"] == "mean"
        compared += 1
    assert compared >= 3


RANDOM = np.random.default_rng(0)
SEX = np.array(["f", "m", ""])[RANDOM.integers(0, 3, 240)]
AGE = RANDOM.integers(20, 90, 240)


@pytest.fixture(scope="module")
def with_columns(tmp_path_factory):
    """A finished run on images with patients, their sex, age and name."""
    folder = tmp_path_factory.mktemp("columns")
    from PIL import Image

    for number in range(240):
        Image.fromarray(RANDOM.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    told = {
        "path": [f"{number}.png" for number in range(240)],
        "label": np.where(RANDOM.integers(0, 2, 240), "a", "b"),
        "site": np.repeat(["Bern", "Graz"], 120),
        "group": np.arange(240) // 2,
        "sex": SEX,
        "age": AGE,
        "name": [f"Smith {number}" for number in range(240)],
    }
    pd.DataFrame(told).to_csv(folder / "list.csv", index=False)
    fed = eq.load_federation(f"manifest:{folder / 'list.csv'}", size=16, store=str(folder / "store"))
    return eq.train(fed, "fedavg", rounds=1, net="small-cnn", out=folder / "run", progress=False)


def test_sub_groups_add_up_to_all_images(with_columns):
    assert with_columns.columns() == ["sex", "age"]
    every = with_columns.evaluate(split="test")
    for by in ("sex", ["sex", "age"]):
        parts = with_columns.scores(by=by)
        for scope in ("site", "pooled"):
            assert parts[parts["scope"] == scope]["n"].sum() == every[every["scope"] == scope]["n"].sum(), by
    assert {*with_columns.scores(by="sex")["sex"]} == {"f", "m", UNKNOWN}


def test_a_sub_group_is_scored_on_its_images_alone(with_columns):
    table = with_columns.predictions()
    own = table[(table["split"] == "test") & (table["sex"] == "f")]
    scores = with_columns.scores(by="sex", interval=True)
    row = scores[(scores["scope"] == "pooled") & (scores["sex"] == "f")].iloc[0]
    assert row["accuracy"] == (own["label"] == own["prediction"]).mean()
    assert row["low(accuracy)"] < row["accuracy"] < row["high(accuracy)"]


def test_names_of_patients_do_not_reach_the_predictions(with_columns):
    with np.load(with_columns.path / "predictions.npz") as file:
        assert "extra:sex" in file and "extra:name" not in file
        assert all("-" in age for age in file["extra:age"])


def test_intervals_stand_beside_the_scores_of_a_run(with_columns):
    plain, with_bounds = with_columns.scores(), with_columns.scores(interval=True)
    pd.testing.assert_frame_equal(plain, with_bounds[plain.columns])
    for metric in ("balanced_accuracy", "macro_f1", "accuracy", "balanced_auc", "ece", "loss"):
        low, value, high = (with_bounds[name] for name in (f"low({metric})", metric, f"high({metric})"))
        assert (low <= value).all() and (value <= high).all(), metric
    assert (with_bounds["low(accuracy)"] < with_bounds["high(accuracy)"]).all()


def test_an_unknown_column_is_refused_with_those_that_are_there(with_columns):
    with pytest.raises(eq.UserError, match=r"no column 'colour'.* there are: sex, age"):
        with_columns.scores(by="colour")


def test_curves_are_of_each_class_site_and_of_all_images(with_columns):
    for kind in ("roc", "precision-recall", "net-benefit"):
        found = with_columns.curves(kind)
        assert {*found["site"]} == {"Bern", "Graz", ""} and {*found["class"]} == {"a", "b"}
    scaled = with_columns.curves("reliability")
    assert {*scaled["scaling"]} == {"as it is", "scaled"}
    with pytest.raises(eq.UserError, match="no curves 'hump'"):
        with_columns.curves("hump")


def test_numbers_become_bands_and_words_stay():
    assert banded(["45.0", "49", "", "50"] + [str(age) for age in range(20, 40)])[:4].tolist() == [
        "40-49",
        "40-49",
        UNKNOWN,
        "50-59",
    ]
    assert banded(["045Y", "7"]).tolist() == ["045Y", "7"]
    assert banded(["scalp", "", "back"]).tolist() == ["scalp", UNKNOWN, "back"]
