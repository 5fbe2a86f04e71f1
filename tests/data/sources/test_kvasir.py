"""Kvasir v2: 7:1:2 within each class, or the folders that FedBM's authors share."""

import shutil

import pytest

from equipoise.core.errors import UserError
from equipoise.data.sources import kvasir


@pytest.fixture
def root(made_up, tmp_path):
    made_up.kvasir(tmp_path / "kvasir", each=20)
    return tmp_path / "kvasir"


def test_the_documented_number_is_8000():
    assert kvasir.EACH * len(kvasir.CLASSES) == 8000


def test_each_class_is_split_7_1_2_and_one_test_set_is_common(root, federated, monkeypatch):
    monkeypatch.setattr(kvasir, "EACH", 20)
    federation = federated("kvasir", root, skip_unreadable=False, sites=2, alpha=5)
    counts = [federation.class_counts(part).tolist() for part in ("train", "valid", "test")]
    assert counts == [[14] * 8, [2] * 8, [4] * 8]
    assert set(federation.common.splits) == {"valid", "test"}


def test_folders_of_parts_are_the_split(root, listed):
    images = sorted(root.rglob("*.jpg"))
    parts = ["test" if number % 5 == 4 else "val" if number % 5 == 3 else "train" for number in range(len(images))]
    for part, path in zip(parts, images):
        target = root / part / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    shutil.rmtree(root / "kvasir-dataset-v2")
    records = listed("kvasir", root).records
    assert [r.split for r in sorted(records, key=lambda r: r.name)] == [part.replace("val", "valid") for part in parts]


def test_images_beside_folders_of_parts_are_refused(root, listed, made_up):
    made_up.picture(root / "train" / "polyps" / "new.jpg", 6, 99)
    with pytest.raises(UserError, match="inside and outside of train, val and test"):
        listed("kvasir", root)


def test_a_copy_with_images_lost_is_refused(root, listed):
    with pytest.raises(UserError, match="20 instead of 1000 in dyed-lifted-polyps"):
        listed("kvasir", root, skip_unreadable=False)
