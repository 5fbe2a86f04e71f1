"""`manifest:FILE` as people write it: other titles, separators, paths of Windows, numbers for labels, more columns."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from equipoise.cli.app import app
from equipoise.core.errors import UserError
from equipoise.data import DataConfig, Federation, load_federation


def image_files(root: Path) -> None:
    """Ten tiny images of each of two classes."""
    for label in "ab":
        (root / label).mkdir()
        for n in range(10):
            Image.new("RGB", (8, 8), (n, ord(label), 0)).save(root / label / f"{n}.png")


@pytest.fixture
def load(tmp_path):
    """Loads a manifest of a header and a line for each of ten images of two classes."""
    image_files(tmp_path)

    def loader(header: str, line: str, **settings):
        lines = [line.format(label=label, n=n, number="ab".index(label)) for label in "ab" for n in range(10)]
        (tmp_path / "list.csv").write_text("\n".join([header, *lines]))
        config = DataConfig(name=f"manifest:{tmp_path / 'list.csv'}", store=tmp_path / "stores", size=8, **settings)
        return load_federation(config, 0)

    return loader


def index_of(federation):
    return federation.sites[0].splits["train"].store.index


def counts(federation):
    return [federation.class_counts(part).tolist() for part in ("train", "valid", "test")]


def test_a_list_without_a_column_is_answered_with_the_option_that_names_it(load):
    with pytest.raises(UserError, match=r"has no column label; it has path, dx\. Name yours: --column label=TITLE"):
        load("path,dx", "{label}/{n}.png,{label}")


def test_columns_may_have_other_titles(load):
    titles = {"path": "file", "label": "dx", "site": "Hospital", "split": "fold", "group": "lesion"}
    federation = load("dx,Hospital,file,fold,lesion", "{label},Graz,{label}/{n}.png,train,{label}{n}", columns=titles)
    assert federation.classes == ("a", "b") and [site.name for site in federation.sites] == ["Graz"]
    assert set(index_of(federation).splits) == {"train"} and index_of(federation).groups[11] == "b1"
    assert index_of(federation).extra == {}
    assert federation.warnings == ()


def test_a_title_that_the_list_lacks_is_named_with_those_that_it_has(load):
    with pytest.raises(UserError, match=r"no column clinic, which data\.columns\.site names; it has path, label"):
        load("path,label", "{label}/{n}.png,{label}", columns={"site": "clinic"})
    with pytest.raises(UserError, match="no column dx; it has path, label"):
        load("path,label", "{label}/{n}.png,{label}", columns={"label": "dx"})


@pytest.mark.parametrize("mark", [";", "\t"])
def test_semicolons_and_tabs_separate_values_too(load, mark):
    federation = load(f"path{mark}label{mark}site", f'{{label}}/{{n}}.png{mark}{{label}}{mark}"Graz, Austria"')
    assert counts(federation) == [[7, 7], [1, 1], [2, 2]]
    assert [site.name for site in federation.sites] == ["Graz, Austria"]


def test_a_semicolon_within_a_value_separates_nothing(load):
    federation = load("path,label,site", "{label}/{n}.png,{label},Graz;Wien")
    assert [site.name for site in federation.sites] == ["Graz;Wien"]


def test_relative_paths_of_windows_are_found(load):
    assert counts(load("path,label", "{label}\\{n}.png,{label}")) == [[7, 7], [1, 1], [2, 2]]


def test_paths_of_one_windows_computer_are_refused_with_a_hint(load):
    with pytest.raises(UserError, match=r"C:\\data\\a\\0\.png.*one Windows computer: write them relative"):
        load("path,label", "C:\\data\\{label}\\{n}.png,{label}")
    with pytest.raises(UserError) as problem:
        load("path,label", "x/{label}/{n}.png,{label}")
    assert "Windows" not in str(problem.value)


@pytest.mark.parametrize("title", ["patient_id", "PatientID", "lesion id", "Subject"])
def test_a_column_of_patients_is_offered_as_group(load, title):
    federation = load(f"path,label,site,{title}", "{label}/{n}.png,{label},x,p{n}")
    (told,) = federation.warnings
    assert told.startswith(f"the column {title} is not used as group") and f"--column group={title}" in told
    federation = load(f"path,label,site,{title}", "{label}/{n}.png,{label},x,p{n}", columns={"group": title})
    assert federation.warnings == () and set(index_of(federation).groups) == {f"p{n}" for n in range(10)}


def test_numbers_stand_for_the_classes_that_the_config_lists(load):
    federation = load("path,label", "{label}/{n}.png,{number}", classes=("nevus", "melanoma"))
    assert federation.classes == ("nevus", "melanoma") and counts(federation)[0] == [7, 7]
    assert index_of(federation).labels.tolist() == [0] * 10 + [1] * 10
    named = load("path,label", "{label}/{n}.png,{number}", classes=("1", "0"))
    assert index_of(named).labels.tolist() == [1] * 10 + [0] * 10, "classes that are called so come first"
    with pytest.raises(UserError, match=r"labels up to 71, but data\.classes names 2 classes, 0 to 1"):
        load("path,label", "{label}/{n}.png,7{number}", classes=("nevus", "melanoma"))


def test_numbers_as_classes_sort_as_people_count(load):
    assert load("path,label", "{label}/{n}.png,{n}").classes == tuple(map(str, range(10)))


def test_other_columns_are_kept_with_the_images(load):
    federation = load("path,age,label,site,sex", "{label}/{n}.png,6{n},{label},x,f")
    assert federation.warnings == ()
    index = index_of(federation)
    assert index.extra == {"age": tuple(f"6{n}" for n in range(10)) * 2, "sex": ("f",) * 20}
    assert index.facts["read_as"].endswith("kept for sub-groups: age, sex")


def test_without_sites_a_column_that_may_tell_them_is_named(load):
    (told,) = load("path,label,centre,age", "{label}/{n}.png,{label},x,7").warnings
    assert "if one of centre, age tells the site, name it: --column site=TITLE" in told
    assert load("path,label,", "{label}/{n}.png,{label},7").warnings == (), "a column without a title tells nothing"


def test_the_command_line_names_columns(tmp_path, monkeypatch):
    image_files(tmp_path)
    (tmp_path / "list.csv").write_text("file;dx\n" + "\n".join(f"{c}/{n}.png;{c}" for c in "ab" for n in range(10)))
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "stores"))
    arguments = ["data", "inspect", f"manifest:{tmp_path / 'list.csv'}", "--size", "8"]
    told = CliRunner().invoke(app, [*arguments, "--column", "label=dx", "--column", "path=file"])
    assert told.exit_code == 0 and "the list names 20 images, 2 classes, 1 sites" in told.output
    wrong = CliRunner().invoke(app, [*arguments, "--column", "dx"])
    assert isinstance(wrong.exception, UserError) and "--column dx: expected name=value" in str(wrong.exception)


def test_an_image_with_several_labels_is_refused_as_multi_label(tmp_path):
    image_files(tmp_path)
    (tmp_path / "list.csv").write_text("path,label\na/0.png,a\nb/0.png,b\na/0.png,b\n")
    with pytest.raises(UserError, match=r"lines 2 and 4: a/0.png has the labels a and b. Multi-label"):
        load_federation(DataConfig(name=f"manifest:{tmp_path / 'list.csv'}", store=tmp_path / "stores", size=8), 0)


def test_rows_of_several_labels_are_refused_as_multi_label():
    images = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    with pytest.raises(UserError, match="Multi-label"):
        Federation.from_arrays(images, np.array([[1, 1], [0, 1]]))
    with pytest.raises(UserError, match="one-hot"):
        Federation.from_arrays(images, np.array([[1, 0], [0, 1]]))
