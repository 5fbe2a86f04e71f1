"""`folder:DIR` in its five layouts: what is read, how it is told, and what is refused."""

import zipfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from equipoise.cli.app import app
from equipoise.core.errors import UserError
from equipoise.data import DataConfig, load_federation
from equipoise.data.layouts import in_order, layout_of
from equipoise.data.sources import folder


def images(root: Path, *folders: str, each: int = 10) -> Path:
    """Folders with tiny images, no two alike."""
    for number, name in enumerate(folders):
        (root / name).mkdir(parents=True)
        for image in range(each):
            picture = Image.new("RGB", (8, 8))
            picture.putpixel((0, 0), (number, image, 1))
            picture.save(root / name / f"{image}.png")
    return root


@pytest.fixture
def load(tmp_path):
    """Loads a folder as a federation."""
    return lambda root, **settings: load_federation(
        DataConfig(name=f"folder:{root}", store=tmp_path / "stores", size=8, **settings), 0
    )


def listed(root, **settings):
    return folder.listing(DataConfig(name=f"folder:{root}", **settings), root)


def test_folders_of_parts_are_a_split_and_no_classes(tmp_path, load):
    root = images(tmp_path / "mine", "Training/nevus", "Training/melanoma", "Testing/nevus", "Testing/melanoma")
    federation = load(root)
    assert federation.classes == ("melanoma", "nevus")
    (site,) = federation.sites
    assert site.name == "mine"
    assert {part: len(split) for part, split in site.splits.items()} == {"train": 18, "valid": 2, "test": 20}
    (told,) = federation.warnings
    assert told.startswith("the folders are read as split/class/ (2 parts: Testing, Training, 2 classes:")


def test_folders_of_hospitals_are_sites_and_no_classes(tmp_path, load):
    root = images(tmp_path, "hospitals/Hospital 10/nevus", "hospitals/Hospital 2/nevus", "hospitals/Hospital 2/mole")
    federation = load(root / "hospitals")
    assert federation.classes == ("mole", "nevus")
    assert [site.name for site in federation.sites] == ["Hospital 2", "Hospital 10"]
    assert "read as site/class/ (2 sites: Hospital 2, Hospital 10, 2 classes: mole, nevus)" in federation.warnings[0]


@pytest.mark.parametrize("layout", ["site/split/class", "split/site/class"])
def test_sites_and_parts_may_stand_in_either_order(tmp_path, load, layout):
    places = {"site": ("north", "south"), "split": ("train", "val", "test"), "class": ("a", "b")}
    first, second, third = layout.split("/")
    root = images(
        tmp_path / "mine", *(f"{x}/{y}/{z}" for x in places[first] for y in places[second] for z in places[third])
    )
    federation = load(root)
    assert federation.classes == ("a", "b")
    assert [site.name for site in federation.sites] == ["north", "south"]
    for site in federation.sites:
        assert {part: len(split) for part, split in site.splits.items()} == {"train": 20, "valid": 20, "test": 20}


def test_numbered_folders_inside_classes_are_part_of_their_class(tmp_path, load):
    federation = load(images(tmp_path / "mine", "nevus/patient-1", "nevus/patient-2", "mole/patient-3"))
    assert federation.classes == ("mole", "nevus")
    assert federation.class_counts("train").tolist() == [7, 14]
    assert federation.warnings == ()


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (("nevus/1", "mole/1"), r"class/ \(2 classes: mole, nevus\) or site/class/ .*--layout class or --layout site"),
        (("benign/nevus", "malignant/melanoma"), "--layout class or --layout site/class .data.layout. decides"),
        (("train", "test"), "folders test, train are named after parts, but .*--layout class"),
        (("nevus/train", "nevus/test", "mole/train"), "named after parts, but .*write a manifest"),
        (("train/nevus", "mole"), "folders train are named after parts"),
        (("train/nevus/1", "train/mole/1"), "split/class/ .* or split/site/class/"),
    ],
)
def test_an_ambiguous_tree_is_refused_with_the_option_that_decides(tmp_path, load, folders, message):
    with pytest.raises(UserError, match=message):
        load(images(tmp_path / "mine", *folders))


def test_the_layout_that_the_user_gives_decides(tmp_path, load):
    root = images(tmp_path / "mine", "A/1", "A/2", "B/1")
    assert load(root, layout="class").classes == ("A", "B")
    by_site = load(root, layout="site/class")
    assert by_site.classes == ("1", "2") and [site.name for site in by_site.sites] == ["A", "B"]
    assert not any("read as" in text for text in by_site.warnings), "the user gave it"
    with pytest.raises(UserError, match=r"folder A/1 holds images, but data\.layout = 'site/split/class'"):
        load(root, layout="site/split/class")
    with pytest.raises(UserError, match=r"takes the folder A for a part; call it train, valid or test"):
        load(root, layout="split/class")


def test_what_macos_adds_hidden_and_empty_folders_are_no_classes_and_are_counted(tmp_path):
    root = images(tmp_path / "mine", "a", "b", "__MACOSX/a", ".cache/x", "b/.thumbnails", each=3)
    (root / "c").mkdir()
    found = listed(root)
    assert found.classes == ("a", "b") and len(found.records) == 6
    assert found.facts["read_as"].endswith("(2 classes: a, b); ignored: 1 __MACOSX, 1 empty, 2 hidden")


def test_files_that_are_not_read_are_counted_by_kind(tmp_path):
    root = images(tmp_path / "mine", "a", "b", each=3)
    for name in ("a/notes.txt", "b/Notes.TXT", "b/scan.mha.gz", "b/LICENCE", "beside.png", "a/.hidden.txt"):
        (root / name).touch()
    (told,) = listed(root).facts["warnings"]
    assert told == "files that are not read were skipped: 2 .txt, 1 .mha.gz, 1 .png, 1 without an ending"


def test_labels_sort_as_people_count(tmp_path):
    assert listed(images(tmp_path / "mine", *map(str, (0, 1, 2, 10)))).classes == ("0", "1", "2", "10")
    assert in_order(["grade 10", "grade 2", "B", "a"]) == ["B", "a", "grade 2", "grade 10"]
    assert in_order(["2", "-1", "0.5", "0.25"]) == ["-1", "0.25", "0.5", "2"]


def test_images_of_class_folders_keep_their_order(tmp_path):
    """A drawn split depends on it: runs of earlier versions can go on."""
    root = images(tmp_path / "mine", "b", "a10", "a2", each=2)
    assert [record.name for record in listed(root).records] == [
        "a10/0.png", "a10/1.png", "a2/0.png", "a2/1.png", "b/0.png", "b/1.png"
    ]  # fmt: skip


def test_zip_files_in_class_folders_belong_to_their_class(tmp_path):
    root = images(tmp_path / "mine", "north/a", "north/b", "south/a", each=2)
    with zipfile.ZipFile(root / "south" / "b.zip", "w") as archive:
        archive.write(root / "south" / "a" / "0.png", "0.png")
    with pytest.raises(UserError, match="folder south holds images"):
        listed(root, layout="site/class")
    (root / "south" / "b").mkdir()
    (root / "south" / "b.zip").rename(root / "south" / "b" / "more.zip")
    found = listed(root)
    assert Counter((record.site, found.classes[record.label]) for record in found.records) == {
        ("north", "a"): 2, ("north", "b"): 2, ("south", "a"): 2, ("south", "b"): 1
    }  # fmt: skip


def test_the_command_line_tells_the_layout_and_takes_another(tmp_path, monkeypatch):
    root = images(tmp_path / "mine", "A/nevus", "A/mole", "B/nevus")
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "stores"))
    arguments = ["data", "inspect", f"folder:{root}", "--size", "8"]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0 and "the folders are read as site/class/ (2 sites: A, B, 2 classes" in told.output
    assert told.output.count("are read as") == 1 and "--layout (data.layout) reads them" in told.output
    other = CliRunner().invoke(app, [*arguments, "--layout", "class"])
    assert "the folders are read as class/ (2 classes: A, B)" in other.output


def test_a_layout_for_other_data_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.layout has no effect on phantom.*it is for folder:DIR"):
        load_federation(DataConfig(store=tmp_path, layout="class"), 0)


def test_one_folder_of_classes_is_one_site():
    assert layout_of(Path("x"), {("images", "a"), ("images", "b")}) == "site/class"
