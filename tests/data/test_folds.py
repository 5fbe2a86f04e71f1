"""Cross-validation and sites that are left out: groups stay whole, every image tests once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from equipoise.data.splits import grouped_folds
from harness import events, run_tiny


@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 20))
def test_folds_never_split_a_group_and_keep_class_shares(folds, size, seed):
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(60), random.integers(1, size + 1, 60))
    strata = random.integers(0, 3, 60)[groups]
    found = grouped_folds(strata, groups, folds, seed)
    assert set(found) == set(range(folds))
    assert all(len(set(found[groups == group])) == 1 for group in range(60))
    for stratum in range(3):
        counts = np.bincount(found[strata == stratum], minlength=folds)
        assert np.ptp(counts) <= 2 * size


def images_of(federation, part):
    return {
        (split.store.index.names[row], split.store.index.groups[row])
        for site in federation.sites
        if (split := site.splits.get(part))
        for row in split.rows
    }


def loaded(tmp_path, **settings):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (300, 16, 16, 3), dtype=np.uint8)
    return eq.Federation.from_arrays(
        images, random.integers(0, 3, 300), np.repeat(["A", "B", "C"], 100), group=np.arange(300) // 3,
        store=tmp_path, **settings,
    )  # fmt: skip


def test_every_image_tests_in_one_fold_and_no_group_in_two_parts(tmp_path):
    tested = []
    for fold in range(4):
        federation = loaded(tmp_path, folds=4, fold=fold)
        parts = {part: images_of(federation, part) for part in ("train", "valid", "test")}
        groups = [{group for _, group in own} for own in parts.values()]
        assert all(parts.values()) and not groups[0] & groups[1] and not (groups[0] | groups[1]) & groups[2]
        tested += [name for name, _ in parts["test"]]
    assert sorted(tested) == sorted({f"{name}" for name in tested}) and len(tested) == 300


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fold": 1}, "data.folds says how many"),
        ({"folds": 3, "fold": 3}, "folds 0 to 2"),
        ({"leave_out": "D"}, "the sites are A, B, C"),
        ({"leave_out": "A", "partition": "dirichlet_equal"}, "draws sites anew"),
    ],
)
def test_folds_and_sites_that_cannot_be_are_refused(tmp_path, settings, told):
    with pytest.raises(eq.UserError, match=told):
        loaded(tmp_path, **settings)


def test_folds_do_not_go_with_whole_sites(tmp_path):
    with pytest.raises(eq.UserError, match="keeps sites whole"):
        eq.load_federation("phantom", phantom={"images": 200, "size": 16}, split="sites", folds=2, store=tmp_path)


def test_a_site_that_is_left_out_tests_with_all_its_images_and_trains_nowhere(tmp_path):
    federation = loaded(tmp_path, leave_out="B")
    assert [site.name for site in federation.sites] == ["A", "C"]
    assert [(cohort.name, len(cohort.splits["test"])) for cohort in federation.cohorts] == [("B", 100)]


OUT = "data.leave_out='site 2'"


def test_at_a_new_site_personal_models_predict_together(tmp_path):
    folder = run_tiny(tmp_path / "run", "fedbn", OUT)
    result = eq.load_result(folder)
    table = result.predictions()
    joint = table[(table["split"] == "cohort") & (table["view"] == "personal")]
    federation = eq.load_federation("phantom", **result.config.data.model_dump(exclude={"name"}))
    pixels = federation.cohorts[0].splits["test"].images(np.arange(len(joint)))
    mean = np.mean([result.model(site)(pixels).numpy() for site in ("site 1", "site 3")], axis=0)
    assert joint.filter(like="p(").to_numpy() == pytest.approx(mean, abs=1e-5)
    told = [e for e in events(folder, "final") if e["scope"] == "cohort"]
    assert [(e["view"], e["site"]) for e in told] == [("personal", "site 2")]
    right = (joint["label"] == joint["prediction"]).mean()
    assert (
        told[0]["metrics"]["accuracy"] == pytest.approx(right)
        and "mean of the predictions" in told[0]["extra"]["models"]
    )
    scores = result.scores(interval=True).set_index("scope").loc["cohort"]
    assert scores["low(accuracy)"] <= scores["accuracy"] <= scores["high(accuracy)"]


def test_at_a_new_site_a_global_model_predicts_where_there_is_one(tmp_path):
    folder = run_tiny(tmp_path / "run", "fedavg", OUT)
    assert [e["view"] for e in events(folder, "final") if e["scope"] == "cohort"] == ["global"]
    again = eq.load_result(folder).evaluate(split="cohort")
    assert {*again["place"]} == {"site 2", ""}
