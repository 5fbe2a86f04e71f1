"""FedIIC's real federation: five sites that train, and a common test set that shares nothing with them."""

from collections import Counter

import pytest

from equipoise.core.errors import UserError
from equipoise.data.sources import fediic_real
from equipoise.data.sources.ham10000 import CLASSES, read_metadata


@pytest.fixture
def root(made_up, tmp_path):
    made_up.fediic_real(tmp_path)
    return tmp_path


def test_the_three_sources_of_ham10000_give_the_papers_imbalance(shared_data):
    """35.43 with PH2's 160 naevi, and Atlas' 575 naevi and 20 dermatofibromas; no other three sources do."""
    rows = [row for row in read_metadata(shared_data).values() if row["dataset"] in fediic_real.SITES]
    counts = Counter(row["dx"] for row in rows)
    assert round((counts["nv"] + 160 + 575) / (counts["df"] + 20), 2) == 35.43
    of_site = Counter(row["dataset"] for row in rows)
    assert all(fediic_real.SITES[site] == count for site, count in of_site.items()) and len(of_site) == 3


def test_five_sites_train_and_one_test_set_is_common(root, federated, by_part):
    federation = federated("fediic-real", root)
    assert [site.name for site in federation.sites] == list(fediic_real.SITES)
    assert all(set(site.splits) == {"train"} for site in federation.sites)
    assert set(federation.common.splits) == {"test"}
    assert by_part(federation)["valid"] == 0


def test_every_image_is_found_and_masks_are_none(root, listed):
    listing = listed("fediic-real", root)
    assert listing.missing() == []
    assert not [record for record in listing.records if record.location.path.stem.endswith("lesion")]


def test_diagnoses_of_ph2_and_atlas_become_ham10000s_classes(root, listed):
    records = {record.name: record for record in listed("fediic-real", root).records}
    assert [CLASSES[records[f"IMD{number:03d}"].label] for number in range(3)] == ["nv", "nv", "mel"]
    found = {name: CLASSES[record.label] for name, record in records.items() if name.startswith("atlas/")}
    assert Counter(found.values()) == {"nv": 6, "bcc": 3, "mel": 3, "df": 3, "bkl": 3, "vasc": 3}


def test_test_images_are_not_ham10000s_and_of_each_class_alike(root, listed, made_up, monkeypatch):
    monkeypatch.setattr(fediic_real, "TEST_IMAGES", 4)
    truth, metadata = root / "ISIC_2019_Training_GroundTruth.csv", read_metadata(root)
    extra = "".join(f"{name},0,1,0,0,0,0,0,0,0\n" for name in metadata)  # as in the real table, which holds HAM10000
    truth.write_text(truth.read_text() + extra)
    listing = listed("fediic-real", root)
    tested = [record for record in listing.records if record.split == "test"]
    assert Counter(CLASSES[record.label] for record in tested) == dict.fromkeys(CLASSES, 4)
    assert not {record.name for record in tested} & set(metadata)
    assert not {r.group for r in tested} & {r.group for r in listing.records if r.split == "train"}


def test_a_copy_of_other_numbers_is_refused(root, listed):
    with pytest.raises(UserError, match="12 instead of 200 in ph2, 21 instead of 963 in atlas"):
        listed("fediic-real", root, skip_unreadable=False)


def test_a_table_of_ph2_without_its_column_is_refused(root, listed):
    (root / "PH2_dataset.txt").write_text("IMD003, 0")
    with pytest.raises(UserError, match="no column Clinical Diagnosis"):
        listed("fediic-real", root)
