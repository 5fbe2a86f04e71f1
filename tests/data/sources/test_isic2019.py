"""ISIC 2019: FedIIC's split goes by the rows of the ground truth, the grouped one by lesions."""

import numpy as np
import pytest

from equipoise.core.errors import UserError
from equipoise.data.sources import isic2019


@pytest.fixture
def images(made_up, tmp_path):
    return made_up.isic2019(tmp_path, each=20)


def test_the_documented_numbers_add_up_to_25331():
    assert sum(isic2019.COUNTS.values()) == 25_331


def test_the_authors_split_is_a_permutation_by_numpys_seed_0(images, tmp_path, listed):
    np.random.seed(0)
    order = np.random.permutation(len(images))
    parts = {}
    for place, row in enumerate(order):
        share = place / len(images)
        parts[images[row][0]] = "train" if share < 0.7 else "valid" if share < 0.8 else "test"
    assert {record.name: record.split for record in listed("isic2019", tmp_path).records} == parts


def test_the_grouped_split_keeps_lesions_together_and_the_authors_does_not(images, tmp_path, federated):
    federation = federated("isic2019", tmp_path, split="grouped")
    index = federation.sites[0].splits["train"].store.index
    places = {"train": federation.sites, "valid": [federation.common], "test": [federation.common]}
    groups = {
        part: {index.groups[row] for site in sites for row in site.splits[part].rows} for part, sites in places.items()
    }
    assert not groups["train"] & groups["test"] and not groups["train"] & groups["valid"]
    assert not groups["valid"] & groups["test"]
    assert "is not clean" in federated("isic2019", tmp_path).warnings[0]


def test_an_image_without_a_lesion_id_is_a_group_of_its_own(images, tmp_path, listed):
    records = {record.name: record for record in listed("isic2019", tmp_path).records}
    assert records[images[0][0]].group == images[0][0]
    assert records[images[1][0]].group.startswith("BCN_")


def test_downsampled_copies_stand_for_their_image(images, tmp_path, listed):
    (name, _), folder = images[0], tmp_path / "ISIC_2019_Training_Input"
    (folder / f"{name}.jpg").rename(folder / f"{name}_downsampled.jpg")
    for table in (isic2019.TRUTH, isic2019.METADATA):
        text = (tmp_path / table).read_text()
        (tmp_path / table).write_text(text.replace(name, f"{name}_downsampled"))
    listing = listed("isic2019", tmp_path)
    assert listing.missing() == [] and listing.records[0].name == f"{name}_downsampled"


def test_a_row_of_two_classes_is_refused(images, tmp_path, listed):
    table = tmp_path / isic2019.TRUTH
    table.write_text(table.read_text().replace("1.0,0.0", "1.0,1.0", 1))
    with pytest.raises(UserError, match=f"labels outside MEL.*{images[0][0]}"):
        listed("isic2019", tmp_path)
