"""RSNA-ICH: slices of one type, FedNPR's ten sites and FedIIC's split; DICOM, PNG and npy."""

import csv

import numpy as np
import pytest

from equipoise.core.errors import UserError
from equipoise.data.sources import rsna_ich

pytest.importorskip("pydicom", reason="needs equipoise[medical]")


@pytest.fixture
def root(made_up, tmp_path):
    made_up.rsna_ich(tmp_path / "ich", each=40)
    return tmp_path / "ich"


def test_the_released_partition_has_the_documented_numbers(shared_data, listed, by_part):
    listing = listed("rsna-ich", shared_data, skip_unreadable=False)
    assert len(listing.records) == 67_969 and listing.facts["warnings"] == []
    assert by_part(listing) == {"train": sum(rsna_ich.TRAIN), "valid": 0, "test": sum(rsna_ich.TEST)}
    assert len({record.site for record in listing.records}) == 10
    pooled = [record.pooled for record in listing.records]
    assert [pooled.count(part) for part in ("train", "valid", "test")] == [47_578, 6_797, 13_594]


def test_each_of_the_ten_sites_has_a_test_part_of_its_own(root, federated):
    federation = federated("rsna-ich", root)
    assert [site.name for site in federation.sites] == [f"site {number}" for number in range(1, 11)]
    assert federation.common is None and all("test" in site.splits for site in federation.sites)


def test_a_drawn_partition_takes_fediics_split_of_all_slices(root, federated, listed, by_part):
    federation = federated("rsna-ich", root, partition="dirichlet_equal", sites=10, alpha=5)
    assert by_part(federation) == {"train": 140, "valid": 20, "test": 40}
    assert set(federation.common.splits) == {"valid", "test"}
    names = federation.common.splits["test"].store.index.names
    tested = {names[row] for row in federation.common.splits["test"].rows}
    np.random.seed(0)
    order = np.random.permutation(200)
    assert tested == {sorted(names)[row] for row in order[160:]}


def test_slices_of_a_patient_are_one_group(root, listed, federated):
    records = listed("rsna-ich", root).records
    assert {record.group for record in records} == {f"ID_patient{number}" for number in range(40)}
    federation = federated("rsna-ich", root, split="grouped", partition="dirichlet_equal", sites=10, alpha=5)
    assert not [warning for warning in federation.warnings if "not clean" in warning]


def test_png_and_npy_are_read_and_come_before_dicom(made_up, root, listed, federated):
    for suffix in (".npy", ".png"):
        made_up.rsna_ich(root, each=40, suffix=suffix)
        assert {record.location.path.suffix for record in listed("rsna-ich", root).records} == {suffix}
        stores = [site.splits["train"].store for site in federated("rsna-ich", root, store=root / suffix).sites]
        assert stores[0].packed.std() > 10


def test_a_window_makes_other_pixels_in_a_store_of_its_own(root, federated):
    own, narrow = (federated("rsna-ich", root, window=window).sites[0].splits["train"] for window in (None, (40, 20)))
    assert own.store.folder != narrow.store.folder
    assert narrow.store.packed.std() > own.store.packed.std()


def test_rsnas_own_table_gives_the_slices_of_one_type(root, listed, federated):
    with open(root / "rsna_ich_10_sites.csv", newline="") as file:
        labels = {row["image"]: int(row["label"]) for row in csv.DictReader(file)}
    (root / "rsna_ich_10_sites.csv").unlink()
    lines = ["ID,Label"]
    for number, (name, label) in enumerate(labels.items()):
        marked = {label, (label + 1) % 5} if number < 3 else {label}
        lines += [f"{name}_{kind},{int(place in marked)}" for place, kind in enumerate(rsna_ich.CLASSES)]
        lines.append(f"{name}_any,1")
    (root / "stage_1_train.csv").write_text("\n".join(lines))
    listing = listed("rsna-ich", root)
    assert {record.name: record.label for record in listing.records} == dict(list(labels.items())[3:])
    assert "without rsna_ich_10_sites.csv" in listing.facts["warnings"][-1]
    assert [site.name for site in federated("rsna-ich", root).sites] == ["rsna"]


def test_the_authors_list_sets_the_order_of_the_split_and_must_name_the_same_slices(root, listed):
    with open(root / "rsna_ich_10_sites.csv", newline="") as file:
        rows = [(row["image"], row["label"]) for row in csv.DictReader(file)]
    backwards = ["id,class", *(f"{name},{label}" for name, label in sorted(rows, reverse=True))]
    sorted_parts = [record.pooled for record in sorted(listed("rsna-ich", root).records, key=lambda r: r.name)]
    (root / "data.csv").write_text("\n".join(backwards))
    parts = [record.pooled for record in sorted(listed("rsna-ich", root).records, key=lambda r: r.name, reverse=True)]
    assert parts == sorted_parts
    (root / "data.csv").write_text("\n".join(backwards[:-1]))
    with pytest.raises(UserError, match="lists other images"):
        listed("rsna-ich", root)


def test_other_numbers_than_the_documented_are_refused(root, listed):
    with pytest.raises(UserError, match="40 instead of 1497 in epidural"):
        listed("rsna-ich", root, skip_unreadable=False)
