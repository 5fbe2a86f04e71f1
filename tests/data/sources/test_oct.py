"""OCT-C8: the official parts are those of the folders, and their numbers are checked."""

import pytest

from equipoise.core.errors import UserError
from equipoise.data.sources import oct


@pytest.fixture
def root(made_up, tmp_path):
    made_up.oct(tmp_path / "oct", each=4)
    return tmp_path / "oct"


@pytest.fixture
def complete(monkeypatch):
    """Makes the made-up numbers the documented ones."""
    monkeypatch.setattr(oct, "EACH", {"train": 4, "valid": 2, "test": 2})


def test_the_documented_numbers_are_the_official_division():
    assert {part: number * len(oct.CLASSES) for part, number in oct.EACH.items()} == {
        "train": 18_400, "valid": 2_800, "test": 2_800,
    }  # fmt: skip


def test_folders_say_class_and_part(root, listed, by_part, complete):
    listing = listed("oct", root, skip_unreadable=False)
    assert by_part(listing) == {"train": 32, "valid": 16, "test": 16}
    for record in listing.records:
        folder = record.location.path.parent
        assert oct.CLASSES[record.label] == folder.name
        assert {"val": "valid"}.get(folder.parent.name, folder.parent.name) == record.split


def test_training_images_are_shared_out_and_the_official_parts_stay_common(root, federated, by_part, complete):
    federation = federated("oct", root, skip_unreadable=False, sites=3, alpha=5)
    assert by_part(federation) == {"train": 32, "valid": 16, "test": 16}
    assert all(set(site.splits) == {"train"} for site in federation.sites)
    assert federation.warnings == ()


def test_an_incomplete_copy_is_refused_with_its_numbers_or_taken_with_a_warning(root, listed, complete):
    (root / "RetinalOCT_Dataset" / "train" / "MH" / "mh_train_1001.jpg").unlink()
    with pytest.raises(UserError, match=r"3 instead of 4 in MH train; .*data\.skip_unreadable = true"):
        listed("oct", root, skip_unreadable=False)
    (warning,) = listed("oct", root).facts["warnings"]
    assert "3 instead of 4 in MH train" in warning


def test_a_folder_of_something_else_is_refused(tmp_path, listed):
    (tmp_path / "train" / "CAT").mkdir(parents=True)
    with pytest.raises(UserError, match="has no image of oct"):
        listed("oct", tmp_path)
