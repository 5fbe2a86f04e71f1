"""Masks: what a federation for segmentation holds, and the masks of the phantom."""

import numpy as np
import pytest

from equipoise.core.errors import UserError
from equipoise.data import DataConfig, load_federation

PHANTOM = {"masks": True, "images": 120, "size": 24, "sites": 3}


def phantom(tmp_path, **settings):
    return load_federation(DataConfig(name="phantom", store=tmp_path, phantom=PHANTOM | settings), seed=1)


def test_a_phantom_with_masks_is_a_federation_for_segmentation(tmp_path):
    federation = phantom(tmp_path)
    assert federation.task == "segmentation"
    assert federation.classes == ("skin", "lesion", "ulcer")
    split = federation.sites[1].splits["train"]
    masks = split.masks(np.arange(len(split)))
    assert masks.shape == (len(split), 24, 24)
    assert masks.numpy().dtype == np.uint8
    assert not split.labels.any()


def test_counts_of_classes_are_counts_of_pixels_and_add_up_over_sites(tmp_path):
    federation = phantom(tmp_path)
    for site in federation.sites:
        for part, split in site.splits.items():
            masks = split.masks(np.arange(len(split))).numpy()
            assert site.class_counts(3, part).tolist() == np.bincount(masks.ravel(), minlength=3).tolist()
    total = sum(site.class_counts(3) for site in federation.sites)
    assert (federation.class_counts() == total).all()
    assert (federation.pooled().class_counts() == total).all()


def test_a_patient_of_the_phantom_has_images_in_one_part_of_one_site(tmp_path):
    places = {}
    for site in phantom(tmp_path).sites:
        for part, split in site.splits.items():
            for name in split.groups():
                places.setdefault(name, []).append((site.name, part))
    assert all(len(set(found)) == 1 and len(found) <= 4 for found in places.values())
    assert any(len(found) == 4 for found in places.values())


def test_ulcers_are_rare_lie_in_lesions_and_change_the_image(tmp_path):
    federation = phantom(tmp_path, difficulty=0.5, shift=0.0)
    share = federation.class_counts() / federation.class_counts().sum()
    assert share[0] > share[1] > 10 * share[2] > 0
    split = federation.sites[0].splits["train"]
    images, masks = split.images(np.arange(len(split))).numpy(), split.masks(np.arange(len(split))).numpy()
    redness = images[:, 0].astype(int) - images[:, 1]
    assert redness[masks == 2].mean() > redness[masks == 1].mean() + 10


def test_lesions_of_a_phantom_with_masks_are_those_of_the_one_with_classes(tmp_path):
    """Masks take no draw from the images' stream: outside ulcers and their blur, the images are the same."""
    plain = load_federation(DataConfig(name="phantom", store=tmp_path, phantom=PHANTOM | {"masks": False}), seed=1)
    masked = phantom(tmp_path)
    assert plain.task == "classification"
    for one, other in zip(plain.sites, masked.sites):
        a, b = one.splits["train"], other.splits["train"]
        masks = b.masks(np.arange(len(b))).numpy()
        healthy = ~(masks == 2).any(axis=(1, 2))
        assert healthy.any()
        assert (a.images(np.arange(len(a))).numpy()[healthy] == b.images(np.arange(len(b))).numpy()[healthy]).all()


@pytest.mark.parametrize("settings", [{"imbalance": 10.0}, {"partition": "concentration"}])
def test_settings_that_act_on_the_class_of_an_image_are_refused(tmp_path, settings):
    with pytest.raises(UserError, match="have masks instead of a class"):
        load_federation(DataConfig(name="phantom", store=tmp_path, phantom=PHANTOM, **settings), seed=1)
