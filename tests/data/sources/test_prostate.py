"""Prostate MRI: the challenges' own files and the prepared folders hold the same patients at the same sites."""

from collections import Counter

import numpy as np
import pytest

from equipoise.core.errors import UserError
from equipoise.data import DataConfig, load_federation

pytest.importorskip("pydicom", reason="needs equipoise[medical]")
pytest.importorskip("nibabel", reason="needs equipoise[medical]")
FIVE = {"A": 30, "B": 30, "C": 13, "D": 12, "E": 12}


def patients_of(listing):
    return Counter(site for site, _ in {(record.site, record.group) for record in listing.records})


def federation_of(name, root, tmp_path, **settings):
    return load_federation(DataConfig(name=name, root=root, store=tmp_path / "stores", size=16, **settings), 0)


def shows_prostates(federation):
    """Whether masks lie where images are bright, but for pixels at borders that resizing mixes."""
    agreement = []
    for site in federation.sites:
        for split in site.splits.values():
            every = np.arange(len(split))
            bright = split.images(every).numpy().mean(axis=1) > 110
            masks = split.masks(every).numpy()
            assert masks.any(axis=(1, 2)).all(), "slices without prostate are left out"
            agreement.append((bright == (masks == 1)).mean())
    return min(agreement) > 0.93


def test_challenge_files_make_the_papers_five_sites(made_up, listed, tmp_path):
    made_up.prostate(tmp_path / "raw")
    listing = listed("prostate", tmp_path / "raw", skip_unreadable=False)
    assert patients_of(listing) == FIVE
    assert {record.name.partition("#")[0] for record in listing.records if record.site == "D"} == {
        f"D Case{number:02d}" for number in range(13) if number != 2
    }
    federation = federation_of("prostate", tmp_path / "raw", tmp_path)
    assert federation.task == "segmentation" and federation.classes == ("background", "prostate")
    assert shows_prostates(federation)
    sizes = [len(set(federation.sites[0].splits[part].groups())) for part in ("train", "valid", "test")]
    assert sizes == [21, 3, 6], "7:1:2 by patient"


def test_prepared_folders_make_five_sites_or_six(made_up, listed, tmp_path):
    made_up.prostate_six(tmp_path / "raw")
    sites = {"RUNMC": "A", "BMC": "B", "UCL": "C", "BIDMC": "D", "HK": "E"}
    five = listed("prostate", tmp_path / "raw", skip_unreadable=False)
    six = listed("prostate-six", tmp_path / "raw", skip_unreadable=False)
    assert patients_of(five) == FIVE
    assert patients_of(six) == {name: FIVE[site] for name, site in sites.items()} | {"I2CVB": 19}
    assert shows_prostates(federation_of("prostate-six", tmp_path / "raw", tmp_path))


def test_other_numbers_of_patients_are_refused(made_up, listed, tmp_path):
    made_up.prostate_six(tmp_path / "raw")
    (tmp_path / "raw" / "HK" / "Case03_segmentation.nii.gz").unlink()
    with pytest.raises(UserError, match=r"prostate \(patients\) .* 11 instead of 12 in E"):
        listed("prostate", tmp_path / "raw", skip_unreadable=False)
    incomplete = listed("prostate", tmp_path / "raw")
    assert "cannot be compared" in incomplete.facts["warnings"][0]


def test_a_folder_without_prostates_says_what_it_should_hold(listed, tmp_path):
    with pytest.raises(UserError, match=r"neither folders RUNMC, BMC, UCL, BIDMC, HK .* unpack zip files first"):
        listed("prostate", tmp_path)


def test_a_series_that_does_not_fit_its_mask_is_refused(made_up, listed, tmp_path):
    made_up.prostate(tmp_path / "raw")
    next((tmp_path / "raw" / "Prostate-3T").rglob("*.dcm")).unlink()
    with pytest.raises(UserError, match="no series has 5 slices, as the mask has"):
        listed("prostate", tmp_path / "raw")
