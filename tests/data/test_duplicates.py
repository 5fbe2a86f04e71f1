"""Equal images under several names, and data on which a federation or a score says little."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equipoise.data import DataConfig, load_federation
from equipoise.data.assembly import assemble
from equipoise.data.duplicates import equal_rows
from equipoise.engine.loop import Run
from equipoise.methods import get_method
from harness import events, tiny_config


@pytest.fixture
def load(tmp_path):
    """Loads a manifest of lines, after drawing the pictures that they name: a path n/3.png shows picture 3."""

    def loader(header: str, lines: list[str], **settings):
        for line in lines:
            path = tmp_path / line.split(",")[0]
            path.parent.mkdir(exist_ok=True)
            picture = Image.new("RGB", (8, 8))
            picture.putpixel((0, 0), (int(path.stem), 200, 0))
            picture.save(path)
        (tmp_path / "list.csv").write_text("\n".join([header, *lines]))
        config = DataConfig(name=f"manifest:{tmp_path / 'list.csv'}", store=tmp_path / "stores", size=8, **settings)
        return load_federation(config, 0)

    return loader


def copies(number: int) -> list[str]:
    """Six pictures, each so many times, three of each class."""
    return [f"c{copy}/{n}.png,{'ab'[n % 2]}" for copy in range(number) for n in range(6)]


def parts_of_pictures(federation) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for part, split in federation.sites[0].splits.items():
        for row in split.rows:
            found.setdefault(Path(split.store.index.names[row]).name, set()).add(part)
    return found


def test_equal_images_in_several_parts_are_counted_and_a_grouped_split_keeps_them_together(load):
    federation = load("path,label", copies(6))
    (told,) = federation.warnings
    spread = sum(len(parts) > 1 for parts in parts_of_pictures(federation).values())
    assert told.startswith(f"images with equal content: {6 * spread} in several parts (c0/") and spread == 6
    assert " = c1/" in told and 'data.split = "grouped" keeps equal images in one part' in told
    grouped = load("path,label", copies(6), split="grouped")
    assert all(len(parts) == 1 for parts in parts_of_pictures(grouped).values())
    assert grouped.warnings == ()


def test_equal_images_join_the_groups_that_they_lie_in(load):
    lines = [f"c/{n}.png,{'ab'[n % 2]},p{n % 10}" for n in range(40)] + ["d/1.png,b,p2", "e/2.png,a,p3"]
    federation = load("path,label,group", lines, split="grouped")
    parts = {}
    for part, split in federation.sites[0].splits.items():
        for row in split.rows:
            parts.setdefault(split.store.index.groups[row], set()).add(part)
    assert len(parts["p1"] | parts["p2"] | parts["p3"]) == 1


def test_equal_images_at_several_sites_and_of_several_classes_are_counted(load):
    lines = [f"c/{n}.png,{'ab'[n % 2]},{'xy'[n // 20]},{'train' if n % 20 < 10 else 'valid'}" for n in range(40)]
    (told,) = load("path,label,site,split", [*lines, "d/0.png,b,x,train", "e/1.png,b,y,train"]).warnings
    assert "2 in several sites, 2 in several classes" in told and "parts" not in told
    assert "sites may share patients; one of their labels is wrong" in told


def test_a_server_is_told_of_equal_images_without_their_names(load):
    owner = load("path,label", copies(6))
    store = owner.sites[0].splits["train"].store
    (told,) = assemble(store, DataConfig(name=owner.name), 0, whole=False).warnings
    assert "36 in several parts: scores" in told and ".png" not in told


def test_empty_images_are_not_equal_ones():
    packed = np.zeros((4, 3, 8, 8), dtype=np.uint8)
    packed[2:, 0, 0, 0] = packed[1, 2] = 1
    assert equal_rows(packed, range(4)) == ((2, 3),)
    assert equal_rows(packed, [0, 1, 2]) == ()


def test_a_class_that_one_site_alone_trains_on_is_named(load):
    lines = [f"c/{n}.png,{'ab'[n % 2]},{'xy'[n // 20]}" for n in range(40)]
    assert load("path,label,site", lines).warnings == ()
    (told,) = load("path,label,site", [*lines, *(f"d/{n}.png,rare,y" for n in range(40, 60))]).warnings
    assert told.startswith("classes with training images at one site only: rare (y); a model may learn the site")


def test_a_method_that_exchanges_models_warns_where_one_site_trains(tmp_path, load):
    lines = [f"c/{n}.png,{'ab'[n % 2]},x" for n in range(40)]
    federation = load("path,label,site", lines)
    for method, warned in (("fedavg", True), ("local", False), ("central", False)):
        Run(tiny_config(method), get_method(method), federation, tmp_path / method).execute()
        told = events(tmp_path / method)[0]["warnings"]
        assert any("only one site trains (x), so fedavg exchanges nothing" in text for text in told) == warned
