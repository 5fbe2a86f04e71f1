"""FEMNIST: writers with few images, 50 of whom are drawn, and each has one part as a whole."""

import json

import numpy as np
import pytest

from equipoise.core.errors import UserError
from equipoise.data import prepare
from equipoise.data.data_config import DataConfig
from equipoise.data.sources import femnist


@pytest.fixture(scope="module")
def root(made_up, tmp_path_factory):
    root = tmp_path_factory.mktemp("femnist")
    made_up.femnist(root, writers=60, each=12)
    return root


DRAWN = {"split": "sites", "sites": 50, "size": 28}


def test_only_writers_with_fewer_than_150_images_take_part(root, listed):
    sites = {record.site for record in listed("femnist", root).records}
    assert len(sites) == 54 and not [name for name in sites if int(name[1:5]) % 10 == 9]


def test_50_writers_are_drawn_and_split_35_5_10(root, federated, by_part):
    federation = federated("femnist", root, **DRAWN)
    assert len(federation.sites) == 35 and all(set(site.splits) == {"train"} for site in federation.sites)
    assert by_part(federation) == {"train": 35 * 12, "valid": 5 * 12, "test": 10 * 12}
    index = federation.common.splits["test"].store.index
    writers = {part: {index.sites[row] for row in split.rows} for part, split in federation.common.splits.items()}
    assert [len(writers[part]) for part in ("valid", "test")] == [5, 10]
    assert not writers["valid"] & writers["test"] and not writers["test"] & {site.name for site in federation.sites}


def test_another_seed_draws_other_writers_and_the_same_seed_the_same(root, federated):
    first, again, other = (
        [site.name for site in federated("femnist", root, seed=seed, **DRAWN).sites] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_more_writers_than_there_are_and_a_drawn_partition_are_refused(root, federated):
    with pytest.raises(UserError, match=r"data\.sites = 55, but femnist has 54 sites"):
        federated("femnist", root, **DRAWN | {"sites": 55})
    with pytest.raises(UserError, match="keeps sites whole"):
        federated("femnist", root, partition="dirichlet_per_class", **DRAWN)


def test_grey_levels_are_those_of_the_file(root, tmp_path):
    config = DataConfig(name="femnist", root=root, store=tmp_path, skip_unreadable=True)
    store = prepare.prepare(config, progress=False)
    content = json.loads(next(iter(sorted(root.rglob("*.json")))).read_text())
    user = content["users"][0]
    expected = np.round(np.array(content["user_data"][user]["x"][3]).reshape(28, 28) * 255)
    row = store.index.rows[store.index.names.index(f"{user}/3")]
    assert (store.packed[row] == expected).all()
    assert store.index.labels[store.index.names.index(f"{user}/3")] == content["user_data"][user]["y"][3]


def test_labels_are_digits_capitals_and_small_letters():
    assert len(femnist.CLASSES) == 62 and [femnist.CLASSES[label] for label in (0, 10, 36)] == ["0", "A", "a"]


def test_files_that_are_not_leafs_are_refused(tmp_path, listed):
    with pytest.raises(UserError, match="no files all_data_"):
        listed("femnist", tmp_path)
    (tmp_path / "all_data_0.json").write_text('{"users": ["a"], "num_samples": [2], "user_data": {"a": {"y": [1]}}}')
    with pytest.raises(UserError, match="differ in number"):
        listed("femnist", tmp_path)
    (tmp_path / "all_data_0.json").write_text("[1, 2]")
    with pytest.raises(UserError, match="is not a file of LEAF"):
        listed("femnist", tmp_path)


def test_another_number_of_writers_is_refused(root, listed):
    with pytest.raises(UserError, match="60 instead of 3597 in writers, 54 instead of 396"):
        listed("femnist", root, skip_unreadable=False)
