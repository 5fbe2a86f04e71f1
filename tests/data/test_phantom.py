"""The phantom has the counts it was asked for, is the same from the same seed, and can be learned."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from equipoise.core.errors import UserError
from equipoise.data import DataConfig, PhantomConfig, load_federation
from equipoise.data.phantom_images import Scanners, render
from equipoise.data.sources.phantom import build, part_counts, phantom_index, site_class_counts

configs = st.builds(
    PhantomConfig,
    sites=st.integers(1, 12),
    classes=st.integers(2, 8),
    images=st.integers(100, 400),
    imbalance=st.floats(1, 50),
    missing=st.floats(0, 0.9),
    skew=st.floats(0, 2),
    common=st.booleans(),
    seed=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(configs)
def test_counts_keep_every_promise_of_the_config(config):
    counts = site_class_counts(config)
    assert counts.sum() == config.images
    assert (counts >= 0).all()
    assert (counts.sum(axis=0) > 0).all(), "a class has no image"
    assert (counts.sum(axis=1) > 0).all(), "a site has no image"
    totals = counts.sum(axis=0)
    assert (np.diff(totals) <= 1).all(), "classes are not in order of frequency"


def test_sites_lack_the_wanted_share_of_classes_and_the_tail_has_the_wanted_ratio():
    config = PhantomConfig(sites=10, classes=5, images=5000, missing=0.4, imbalance=25)
    counts = site_class_counts(config)
    assert ((counts == 0).sum(axis=1) == 2).all()
    totals = counts.sum(axis=0)
    assert totals[0] / totals[-1] == pytest.approx(25, rel=0.05)


@settings(max_examples=30, deadline=None)
@given(configs)
def test_every_site_trains_and_a_class_with_three_images_is_in_every_part(config):
    index, sites = phantom_index(config)
    parts = np.array(index.splits)
    for site in range(config.sites):
        assert ((sites == site) & (parts == "train")).any()
        for label in range(config.classes):
            cell = (sites == site) & (index.labels == label)
            if cell.sum() >= 3:
                assert set(parts[cell]) == {"train", "valid", "test"}


def test_the_same_config_gives_the_same_images_and_another_seed_others(tmp_path):
    config = PhantomConfig(images=60, size=16)
    first, again = build(config, tmp_path / "a"), build(config, tmp_path / "b")
    other = build(config.model_copy(update={"seed": 1}), tmp_path / "a")
    assert (first.packed == again.packed).all()
    assert other.folder != first.folder
    assert (other.packed != first.packed).any()


def test_a_made_phantom_is_opened_not_made_again(tmp_path):
    config = PhantomConfig(images=40, size=16)
    written = build(config, tmp_path).folder / "images.npy"
    before = written.stat().st_mtime_ns
    build(config, tmp_path)
    assert written.stat().st_mtime_ns == before
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path != written.parent]


def test_without_shift_all_scanners_are_alike_and_with_it_sites_differ():
    rng = np.random.default_rng(0)
    same = Scanners.draw(3, 0.0, rng)
    assert np.ptp(same.gain) == np.ptp(same.gamma) == np.ptp(same.blur) == np.ptp(same.noise) == 0
    labels, sites = np.zeros(240, dtype=np.int64), np.repeat(np.arange(3), 80)
    flat, shifted = (
        [images[sites == site].mean() for site in range(3)]
        for images in (render(labels, sites, scanners, 16, 1.0, 0) for scanners in (same, Scanners.draw(3, 2.0, rng)))
    )
    assert np.ptp(flat) < 5 < np.ptp(shifted)


def test_two_thousand_images_take_seconds(tmp_path):
    start = time.process_time()
    store = build(PhantomConfig(), tmp_path)
    assert store.packed.shape == (2000, 3, 32, 32)
    assert time.process_time() - start < 8


def test_classes_can_be_learned_and_rare_ones_are_harder(tmp_path):
    federation = load_federation(DataConfig(store=tmp_path), seed=0).pooled()
    tests = [site.splits["test"] for site in federation.sites if "test" in site.splits]
    train = federation.sites[0].splits["train"]
    scaler = StandardScaler().fit(simple_features(train))
    model = LogisticRegression(C=0.3, max_iter=300)
    model.fit(scaler.transform(simple_features(train)), train.labels)
    labels = np.concatenate([split.labels for split in tests])
    predicted = np.concatenate([model.predict(scaler.transform(simple_features(split))) for split in tests])
    recall = np.array([(predicted[labels == label] == label).mean() for label in range(5)])
    assert recall.mean() > 2 * 0.2, "chance is 0.2"
    assert recall[0] > 0.8
    assert recall[[2, 4]].mean() < recall[:2].mean() - 0.2


def simple_features(split) -> np.ndarray:
    """Coarse colours and local contrast of a split's images."""
    images = split.images(np.arange(len(split))).float() / 255
    blocks = images.unfold(2, 4, 4).unfold(3, 4, 4)
    return np.hstack([blocks.mean((4, 5)).flatten(1).numpy(), blocks.std((4, 5)).flatten(1).numpy()])


def test_an_unseen_cohort_only_tests_and_no_site_has_its_scanner(tmp_path):
    config = DataConfig(store=tmp_path, phantom=PhantomConfig(images=200, size=16, cohort=40))
    federation = load_federation(config, seed=0)
    (cohort,) = federation.cohorts
    assert {part: len(split) for part, split in cohort.splits.items()} == {"test": 40}
    assert cohort.name not in {site.name for site in federation.sites}


def test_a_common_evaluation_set_leaves_sites_with_training_images_only(tmp_path):
    config = DataConfig(store=tmp_path, phantom=PhantomConfig(images=200, size=16, common=True))
    federation = load_federation(config, seed=0)
    assert all(set(site.splits) == {"train"} for site in federation.sites)
    assert set(federation.common.splits) == {"valid", "test"}
    assert (federation.common.class_counts(5, "test") > 0).all()


def test_impossible_phantoms_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot fill 10 sites"):
        build(PhantomConfig(sites=10, images=5), tmp_path)
    with pytest.raises(ValidationError):
        PhantomConfig(classes=1)


@pytest.mark.parametrize("setting", ["images", "sites", "cohort", "size"])
def test_absurd_numbers_are_refused(setting):
    with pytest.raises(ValidationError, match=f"{setting}\n *Input should be less than or equal to"):
        PhantomConfig(**{setting: 10**12})


def test_a_phantom_that_fills_the_memory_is_refused_before_it_does(tmp_path):
    config = DataConfig(store=tmp_path, size=1024, phantom=PhantomConfig(images=100_000))
    with pytest.raises(UserError, match=r"100000 images of 1024 pixels takes 315 GB of memory.*data\.phantom\.images"):
        load_federation(config, 0)


def test_patients_with_any_disease_come_to_hospitals_that_never_trained_on_it():
    config = PhantomConfig(images=1200, missing=0.4, imbalance=10, patients="any")
    counts = part_counts(config)
    trained, tested = counts[..., 0], counts[..., 2]
    assert (trained == 0).any() and (tested > 0).all()
    assert counts.sum() == config.images and (tested.max(axis=0) - tested.min(axis=0) <= 1).all()


def test_a_phantom_of_own_patients_is_the_one_of_before(tmp_path):
    told = build(PhantomConfig(images=60), tmp_path).folder.name
    assert told == "phantom-dd357dadfcf9"  # stores of earlier versions are found
