"""HAM10000's masks of lesions: four sites, lesions as groups, and the real files where they are at hand."""

from pathlib import Path

import numpy as np
import pytest

from equipoise.core.errors import UserError
from equipoise.data import DataConfig, load_federation

REAL = Path(__file__).parents[4] / "shared" / "data"


def test_images_are_paired_with_masks_of_the_published_names(made_up, listed, tmp_path):
    made_up.ham10000_lesions(tmp_path)
    listing = listed("ham10000-lesions", tmp_path)
    assert listing.masks and not listing.missing()
    assert [record.mask.path.stem for record in listing.records[:2]] == [
        f"{record.name}_segmentation" for record in listing.records[:2]
    ]
    config = DataConfig(name="ham10000-lesions", root=tmp_path, store=tmp_path / "s", size=24, skip_unreadable=True)
    federation = load_federation(config, 0)
    assert [site.name for site in federation.sites] == ["vidir_modern", "vidir_molemax", "rosendahl", "vienna_dias"]
    for split in federation.sites[2].splits.values():
        dark = split.images(np.arange(len(split))).numpy().mean(axis=1) < 135
        assert (dark == (split.masks(np.arange(len(split))).numpy() == 1)).mean() > 0.95


def test_an_image_without_a_mask_is_named(made_up, tmp_path):
    made_up.ham10000_lesions(tmp_path)
    next((tmp_path / "HAM10000_segmentations_lesion_tschandl").iterdir()).unlink()
    with pytest.raises(UserError, match="does not have the documented numbers"):
        load_federation(DataConfig(name="ham10000-lesions", root=tmp_path, store=tmp_path / "s", size=24), 0)
    config = DataConfig(name="ham10000-lesions", root=tmp_path, store=tmp_path / "s", size=24, skip_unreadable=True)
    assert any("1 missing or unreadable image was left out" in text for text in load_federation(config, 0).warnings)


@pytest.mark.skipif(not (REAL / "ham10000_masks_200x150.zip").exists(), reason="HAM10000's masks are not here")
def test_the_real_copy_is_complete(listed):
    listing = listed("ham10000-lesions", REAL, skip_unreadable=False)
    assert len(listing.records) == 10_015 and not listing.missing()
    assert len({record.group for record in listing.records}) == 7_470


def test_some_of_the_images_keep_each_sites_share(made_up, tmp_path):
    made_up.ham10000_lesions(tmp_path)
    settings = {"name": "ham10000-lesions", "root": tmp_path, "store": tmp_path / "s", "size": 24}
    federation = load_federation(DataConfig(**settings, skip_unreadable=True, images=40), 0)
    found = [sum(len(split) for split in site.splits.values()) for site in federation.sites]
    assert found == [10, 10, 10, 10]
    with pytest.raises(UserError, match=r"data\.images = 2"):
        load_federation(DataConfig(**settings, skip_unreadable=True, images=2), 0)
