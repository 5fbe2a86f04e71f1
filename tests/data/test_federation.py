"""A federation's sites, its pooled form, and how a store becomes one: parts, partitions, limits, refusals."""

import csv
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from equipoise.cli.inspection import bubble_chart, table
from equipoise.core.errors import UserError
from equipoise.data import DataConfig, Federation, PhantomConfig, Site, Split, load_federation
from equipoise.data.partition import dirichlet_per_class
from equipoise.data.splits import PARTS

PHANTOM = PhantomConfig(images=400, size=16)


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture
def load(stores):
    """Loads the small phantom with some data settings."""

    def loader(seed: int = 0, **settings) -> Federation:
        return load_federation(DataConfig(store=stores, phantom=PHANTOM, **settings), seed)

    return loader


@pytest.fixture
def manifest(tmp_path):
    """Writes a manifest of tiny images from rows of path, label and optional columns."""

    def writer(rows: list[dict]) -> Path:
        for row in rows:
            if not (tmp_path / row["path"]).exists():
                Image.new("RGB", (8, 8)).save(tmp_path / row["path"])
        with open(tmp_path / "list.csv", "w", newline="") as file:
            output = csv.DictWriter(file, list(rows[0]))
            output.writeheader()
            output.writerows(rows)
        return tmp_path / "list.csv"

    return writer


def rows_of(federation: Federation, part: str) -> list[int]:
    splits = [site.splits[part] for site in federation.sites if part in site.splits]
    return sorted(row for split in splits for row in split.rows.tolist())


def test_a_split_reads_the_images_at_its_positions(load):
    split = load().sites[0].splits["train"]
    images = split.images(torch.tensor([2, 0]))
    assert images.dtype == torch.uint8
    assert images.shape == (2, 3, 16, 16)
    assert (images[0].numpy() == split.store.packed[split.rows[2]]).all()
    assert (images[1].numpy() == split.store.packed[split.rows[0]]).all()


def test_a_pickled_federation_carries_no_images(load):
    federation = load()
    content = pickle.dumps(federation)
    copy = pickle.loads(content)
    assert len(content) < federation.sites[0].splits["train"].store.packed.nbytes / 10
    split, again = federation.sites[1].splits["test"], copy.sites[1].splits["test"]
    assert (split.images(np.arange(3)) == again.images(np.arange(3))).all()


def test_an_empty_part_is_simply_not_there(load):
    split = load().sites[0].splits["train"]
    nothing = Split(split.store, split.rows[:0], split.labels[:0])
    site = Site("x", {"train": split, "valid": nothing})
    assert set(site.splits) == {"train"}
    assert site.class_counts(5, "valid").tolist() == [0] * 5
    assert site.class_counts(5).sum() == len(split)
    with pytest.raises(ValueError, match="unknown parts"):
        Site("x", {"holdout": split})


def test_pooling_moves_all_training_images_to_one_site_and_leaves_evaluation_where_it_was(load):
    federation = load()
    pooled = federation.pooled()
    assert [site.name for site in pooled.training_sites()] == ["pooled"]
    assert rows_of(pooled, "train") == rows_of(federation, "train")
    for before, after in zip(federation.sites, pooled.sites[1:]):
        assert before.name == after.name
        assert set(after.splits) == {"valid", "test"}
        assert (before.splits["test"].rows == after.splits["test"].rows).all()


def test_a_partition_shares_out_all_training_images_and_leaves_one_common_evaluation_set(load):
    whole, parted = load(), load(partition="dirichlet_per_class", sites=6, alpha=1.0)
    assert [site.name for site in parted.sites] == [f"site {number}" for number in range(1, 7)]
    assert all(set(site.splits) == {"train"} for site in parted.sites)
    assert rows_of(parted, "train") == rows_of(whole, "train")
    for part in ("valid", "test"):
        assert sorted(parted.common.splits[part].rows) == rows_of(whole, part)


def test_settings_of_a_partition_that_is_not_drawn_are_told_to_have_no_effect(load):
    assert not any("no effect" in warning for warning in load().warnings)
    told = [warning for warning in load(sites=5, alpha=0.1).warnings if "no effect" in warning]
    assert [warning.split()[0] for warning in told] == ["data.alpha", "data.sites"]


def test_settings_of_images_that_are_read_are_told_to_have_no_effect_on_the_phantom(load):
    told = [warning for warning in load(crop="squash", colour_constancy=True).warnings if "no effect" in warning]
    assert [warning.split()[0] for warning in told] == ["data.crop", "data.colour_constancy"]


def test_the_partition_is_drawn_from_the_run_seed_unless_it_has_its_own(load):
    settings = {"partition": "dirichlet_per_class", "sites": 5, "alpha": 1.0}
    counts = lambda federation: [site.class_counts(5).tolist() for site in federation.sites]  # noqa: E731
    assert counts(load(1, **settings)) != counts(load(2, **settings))
    fixed = [counts(load(seed, partition_seed=1, **settings)) for seed in (1, 2)]
    assert fixed[0] == fixed[1] == counts(load(1, **settings))
    labels = np.concatenate([site.splits["train"].labels for site in load().sites])
    direct = dirichlet_per_class(labels, 5, 1.0, 1)
    assert [np.bincount(labels[direct == site], minlength=5).tolist() for site in range(5)] == fixed[0]


def test_an_empty_site_is_refused_with_the_way_out_and_redraw_takes_it(load):
    settings = {"partition": "dirichlet_per_class", "sites": 12, "alpha": 0.05}
    with pytest.raises(UserError, match=r"data\.redraw = true"):
        load(**settings)
    redrawn = load(redraw=True, **settings)
    assert len(redrawn.training_sites()) == 12
    assert any(" of seed 0 left a site with fewer" in text for text in redrawn.warnings)
    with pytest.raises(UserError, match=r"data\.min_images = 100"):
        load(redraw=True, min_images=100, **settings)


def test_seeds_that_are_drawn_again_do_not_meet(load):
    settings = {"partition": "dirichlet_per_class", "sites": 12, "alpha": 0.05, "redraw": True}
    drawn = [[site.class_counts(5).tolist() for site in load(seed, **settings).sites] for seed in range(8)]
    assert all(one != other for place, one in enumerate(drawn) for other in drawn[:place])


def test_the_other_partitions_are_reached_by_name(load):
    equal = load(partition="dirichlet_equal", sites=10)
    sizes = [len(site.splits["train"]) for site in equal.sites]
    assert max(sizes) - min(sizes) <= 1
    removed = load(partition="concentration", sites=4, alphas=(5.0,) * 5, removal=0.5)
    assert rows_of(removed, "train") == rows_of(equal, "train")
    with pytest.raises(UserError, match="2 values for 5 classes"):
        load(partition="concentration", sites=4, alphas=(1.0, 1.0))


def test_long_tail_subsampling_touches_training_images_only(load):
    before, after = load(), load(imbalance=60)
    counts = after.pooled().sites[0].class_counts(5)
    assert counts[0] / counts[-1] == pytest.approx(60, rel=0.3)
    assert rows_of(before, "test") == rows_of(after, "test")
    assert set(rows_of(after, "train")) < set(rows_of(before, "train"))


def test_a_limit_holds_per_site_and_part_and_keeps_classes(load):
    before, after = load(), load(limit=6)
    for whole, few in zip(before.sites, after.sites):
        for part, split in few.splits.items():
            assert len(split) == min(6, len(whole.splits[part]))
            assert set(split.labels) == set(whole.splits[part].labels)
    assert [site.splits["train"].rows.tolist() for site in after.sites] == [
        site.splits["train"].rows.tolist() for site in load(7, limit=6).sites
    ]


def test_only_the_named_sites_train_and_the_others_still_test(load):
    federation = load(training_sites=("site 2",))
    assert [site.name for site in federation.training_sites()] == ["site 2"]
    assert len(federation.sites) == 4
    with pytest.raises(UserError, match="'site 9'"):
        load(training_sites=("site 9",))


def test_a_site_named_to_train_without_training_images_is_refused(manifest, stores):
    rows = [{"path": f"{i}.png", "label": "ab"[i % 2], "site": "x", "split": "train"} for i in range(20)]
    rows += [{"path": "20.png", "label": "a", "site": "y", "split": "test"}]
    name = f"manifest:{manifest(rows)}"
    federation = load_federation(DataConfig(name=name, store=stores, size=8), 0)
    assert [site.name for site in federation.training_sites()] == ["x"]
    assert [site.name for site in federation.sites] == ["x", "y"]
    with pytest.raises(UserError, match="'y', which has no training image"):
        load_federation(DataConfig(name=name, store=stores, size=8, training_sites=("y",)), 0)


def test_a_federation_without_any_training_image_is_refused(manifest, stores):
    name = f"manifest:{manifest([{'path': f'{i}.png', 'label': 'ab'[i], 'split': 'test'} for i in range(2)])}"
    with pytest.raises(UserError, match=r"no site of .* has a training image"):
        load_federation(DataConfig(name=name, store=stores, size=8), 0)


def test_a_class_without_any_image_is_refused_and_one_without_training_images_is_reported(manifest, stores):
    rows = [{"path": f"{i}.png", "label": "a", "split": "train"} for i in range(12)]
    rows += [{"path": "b.png", "label": "b", "split": "test"}]
    name = f"manifest:{manifest(rows)}"
    federation = load_federation(DataConfig(name=name, store=stores, size=8), 0)
    assert "no training image of class b at any site" in federation.warnings
    with pytest.raises(UserError, match="no image of class 'c' anywhere"):
        load_federation(DataConfig(name=name, store=stores, size=8, classes=("a", "b", "c")), 0)


def test_a_class_too_rare_for_a_part_of_the_federation_is_reported_in_one_line(manifest, stores):
    parts = ("train", "train", "valid", "test")
    rows = [
        {"path": f"{c}{i}.png", "label": c, "site": "xy"[i // 4], "split": parts[i % 4]} for c in "ab" for i in range(8)
    ]
    rows += [{"path": "c.png", "label": "c", "site": "x", "split": "train"}]
    rows += [{"path": f"d{i}.png", "label": "d", "site": "xy"[i], "split": part} for i, part in enumerate(parts[1:3])]
    rows += [{"path": f"d{i}.png", "label": "d", "site": "y", "split": "train"} for i in range(2, 5)]
    config = DataConfig(name=f"manifest:{manifest(rows)}", store=stores, size=8)
    warning, _ = load_federation(config, 0).warnings
    assert "federation: c (1 training image and no validation image and no test image), d (no test image); " in warning
    assert warning.endswith("has no part in those scores")
    assert load_federation(config, 0, whole=False).warnings == (), "one hospital does not know the others' images"


def test_a_site_that_only_measures_is_named_unless_it_was_chosen(manifest, stores):
    rows = [{"path": f"{c}{i}.png", "label": c, "site": "x", "split": p} for c in "ab" for i, p in enumerate(PARTS * 2)]
    rows += [{"path": f"{c}y.png", "label": c, "site": "y", "split": "test"} for c in "ab"]
    config = DataConfig(name=f"manifest:{manifest(rows)}", store=stores, size=8)
    told = ("sites without training images only measure models: y",)
    assert load_federation(config, 0).warnings == told
    chosen = config.model_copy(update={"training_sites": ("x",)})
    assert load_federation(chosen, 0).warnings == ()


def test_classes_that_single_sites_lack_are_not_too_rare(load):
    federation = load()
    assert any((site.class_counts(5) == 0).any() for site in federation.sites)
    assert federation.warnings == ()
    assert load(partition="dirichlet_per_class", sites=3, alpha=0.3).warnings == (), "all share one test set"


def test_no_class_is_blamed_for_a_part_that_is_empty_altogether(manifest, stores):
    rows = [{"path": f"{i}.png", "label": "ab"[i % 2], "split": ("train", "valid")[i // 10]} for i in range(20)]
    federation = load_federation(DataConfig(name=f"manifest:{manifest(rows)}", store=stores, size=8), 0)
    assert federation.warnings == ()
    assert federation.class_counts("test").tolist() == [0, 0]


def test_a_given_split_that_parts_groups_is_used_with_a_warning_and_grouping_mends_it(manifest, stores):
    parts = ("train", "valid", "test")
    rows = [
        {"path": f"{i}.png", "label": "ab"[i % 2], "site": "xy"[i // 15], "split": parts[i % 3], "group": f"g{i // 3}"}
        for i in range(30)
    ]
    config = DataConfig(name=f"manifest:{manifest(rows)}", store=stores, size=8)
    (warning,) = load_federation(config, 0).warnings
    assert "10 of 10 test groups are also in train" in warning
    assert "site y: 5 of 5 test groups are also in train" in warning
    grouped = load_federation(config.model_copy(update={"split": "grouped"}), 0)
    assert grouped.warnings == ()
    groups = np.array(grouped.sites[0].splits["train"].store.index.groups)
    by_part = [set(groups[rows_of(grouped, part)]) for part in parts]
    assert not (by_part[0] & by_part[2] or by_part[0] & by_part[1] or by_part[1] & by_part[2])


def test_a_split_without_validation_gives_up_a_tenth_of_its_training_images(manifest, stores):
    rows = [{"path": f"{i}.png", "label": "ab"[i % 2], "split": "train" if i < 40 else "test"} for i in range(50)]
    federation = load_federation(DataConfig(name=f"manifest:{manifest(rows)}", store=stores, size=8), 0)
    assert {part: len(split) for part, split in federation.sites[0].splits.items()} == {
        "train": 36, "valid": 4, "test": 10,
    }  # fmt: skip


def test_the_table_counts_every_site_part_and_class(load):
    federation = load()
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(federation))
    lines = capture.get().splitlines()
    first = federation.sites[0]
    numbers = [str(count) if count else "-" for count in first.class_counts(5)]
    assert any(line.split() == ["site", "1", "train", *numbers, str(len(first.splits["train"]))] for line in lines)
    assert sum("train" in line or "valid" in line or "test" in line for line in lines) == 12


def test_the_table_prints_names_as_they_are_even_where_they_look_like_markup(load):
    federation = load()
    named = replace(
        federation,
        classes=("[red]hot", ":warning:", *federation.classes[2:]),
        sites=(replace(federation.sites[0], name="[/]Ward [1]"), *federation.sites[1:]),
    )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(named))
    assert all(name in capture.get() for name in ("[red]hot", ":warning:", "[/]Ward [1]"))


@pytest.mark.parametrize("name", ["chart.xyz", "chart"])
def test_a_chart_of_an_unknown_kind_is_refused_with_the_known_ones(load, tmp_path, name):
    with pytest.raises(UserError, match=rf"{name}: .*\.png, \.svg, \.pdf"):
        bubble_chart(load(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_bubble_chart_is_a_picture_with_something_in_it(load, tmp_path):
    bubble_chart(load(partition="dirichlet_per_class", sites=3, alpha=1.0), tmp_path / "chart.png")
    pixels = np.asarray(Image.open(tmp_path / "chart.png").convert("RGB")).reshape(-1, 3)
    assert len(pixels) > 100_000
    assert (np.abs(pixels.astype(int) - (42, 111, 151)).max(axis=1) < 12).sum() > 1000, "no training colour"
    assert (np.abs(pixels.astype(int) - (184, 160, 126)).max(axis=1) < 12).sum() > 1000, "no test colour"
