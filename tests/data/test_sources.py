"""Sources: the documented numbers of the public data sets, and what users bring as folders and manifests."""

import csv
import io
import os
import re
import shlex
import zipfile
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from equipoise.cli.data import data_app
from equipoise.core.errors import UserError
from equipoise.data import DataConfig, Store, load_federation, prepare, sources
from equipoise.data.assembly import assemble
from equipoise.data.raw import Archives, decode
from equipoise.data.sources import Listing, Record
from equipoise.data.splits import count_leaks
from equipoise.data.store import IMAGES, write_index


@cache
def list_source(name: str, root: Path) -> Listing:
    return sources.load(name).listing(DataConfig(name=name), root)


def groups_by_part(records: list[Record]) -> dict[str, set[str]]:
    return {part: {r.group for r in records if r.split == part} for part in ("train", "valid", "test")}


def federation_of(listing: Listing, folder: Path, **settings):
    """The federation of a listing whose store has 8 px images that were never decoded (all black)."""
    records = [record for record in listing.records if record.location is not None]
    folder.mkdir()
    np.save(folder / IMAGES, np.zeros((len(records), 3, 8, 8), dtype=np.uint8))
    write_index(folder, prepare.store_index(listing, records, {}))
    return assemble(Store(folder), DataConfig(name=listing.source, **settings), seed=0)


def image_files(root: Path, layout: dict[str, int]) -> Path:
    """Folders with so many tiny images each."""
    for folder, count in layout.items():
        (root / folder).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(root / folder / f"{number}.png")
    return root


# ---- the public data sets ----


def test_dermoscopy_prr_has_the_papers_counts_and_every_image_is_found(shared_data, tmp_path):
    listing = list_source("dermoscopy-prr", shared_data)
    assert listing.missing() == []
    federation = federation_of(listing, tmp_path / "store")
    assert [site.name for site in federation.sites] == ["A", "B", "C", "D"]
    totals = {part: sum(len(site.splits[part]) for site in federation.sites) for part in ("train", "valid", "test")}
    assert totals == {"train": 7343, "valid": 1046, "test": 2101}
    assert sum(site.class_counts(3) for site in federation.sites).tolist() == [5408, 941, 994]
    (cohort,) = federation.cohorts
    assert cohort.name == "vienna_dias"
    assert cohort.class_counts(3, "test").tolist() == [350, 10, 67]


def test_dermoscopy_prr_reports_the_lesions_that_the_authors_split_shares(shared_data, tmp_path):
    records = list_source("dermoscopy-prr", shared_data).records
    leaks = {site: count_leaks(groups_by_part([r for r in records if r.site == site])) for site in "ABCD"}
    assert leaks["A"].startswith("384 of 527 test groups are also in train; 420 of 527 test groups")
    assert leaks["C"].startswith("150 of 307 test groups are also in train; 169 of 307 test groups")
    assert leaks["B"] is None
    assert leaks["D"] is None
    federation = federation_of(list_source("dermoscopy-prr", shared_data), tmp_path / "store")
    assert "site A: 384 of 527 test groups are also in train" in federation.warnings[0]


def test_dermoscopy_prr_grouped_shares_no_lesion_even_between_sites_and_keeps_7_1_2(shared_data, tmp_path):
    federation = federation_of(list_source("dermoscopy-prr", shared_data), tmp_path / "store", split="grouped")
    assert federation.warnings == ()
    for site in federation.sites:
        parts = np.stack([site.class_counts(3, part) for part in ("train", "valid", "test")])
        assert (np.abs(parts / parts.sum(axis=0) - np.array([[0.7], [0.1], [0.2]])) < 0.06).all(), site.name


def test_ham10000_has_both_published_splits(shared_data, tmp_path):
    listing = list_source("ham10000", shared_data)
    assert listing.missing() == []
    assert count_leaks(groups_by_part(listing.records)).startswith("641 of 1868 test groups are also in train")
    federation = federation_of(listing, tmp_path / "store", partition="dirichlet_per_class", sites=10)
    assert sum(len(site.splits["train"]) for site in federation.sites) == 7007
    assert {part: len(split) for part, split in federation.common.splits.items()} == {"valid": 1003, "test": 2005}
    clean = assemble(Store(tmp_path / "store"), DataConfig(name="ham10000", split="grouped"), 0)
    assert clean.warnings == ()
    assert [site.name for site in clean.sites] == ["vidir_modern", "vidir_molemax", "rosendahl", "vienna_dias"]
    assert sum(len(site.splits["test"]) for site in clean.sites) == 1232


def test_fed_isic2019_has_the_official_folds_of_the_centres_that_are_there(shared_data, tmp_path):
    listing = list_source("fed-isic2019", shared_data)
    assert listing.missing() == []
    ham = [record for record in listing.records if record.site != "msk"]
    assert count_leaks(groups_by_part(ham)) == "696 of 1862 test groups are also in train"
    federation = federation_of(listing, tmp_path / "store")
    names = ["vidir_molemax", "vidir_modern", "rosendahl", "msk", "vienna_dias"]
    assert [site.name for site in federation.sites] == names
    assert [len(site.splits["test"]) for site in federation.sites] == [791, 672, 452, 164, 88]
    assert [len(site.splits["train"]) + len(site.splits["valid"]) for site in federation.sites] == [
        3163, 2691, 1807, 655, 351,
    ]  # fmt: skip
    assert federation.classes == ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    assert any("bcn" in warning for warning in federation.warnings)
    rosendahl = sum(federation.sites[2].class_counts(8, part) for part in ("train", "valid", "test"))
    assert rosendahl.tolist() == [342, 803, 296, 109, 490, 30, 3, 186]


def test_fed_isic2019_has_six_centres_where_bcn_is_there_too(shared_data, tmp_path):
    for file in shared_data.iterdir():
        os.symlink(file, tmp_path / file.name)
    with open(shared_data / "splits" / "fed_isic2019_train_test_split.csv", newline="") as file:
        names = [row["image"] for row in csv.DictReader(file) if row["center"] == "0"]
    with zipfile.ZipFile(tmp_path / "bcn.zip", "w") as archive:
        for name in names:
            archive.writestr(f"ISIC_2019_Training_Input/{name}.jpg", "")
    listing = list_source("fed-isic2019", tmp_path)
    assert listing.missing() == []
    assert len(listing.records) == 23247
    assert Counter(record.site for record in listing.records)["bcn"] == 12413
    assert listing.facts["warnings"] == []


def test_fed_isic2019_validates_on_lesions_that_do_not_train(shared_data, tmp_path):
    federation = federation_of(list_source("fed-isic2019", shared_data), tmp_path / "store")
    groups = np.array(Store(tmp_path / "store").index.groups)
    train, valid = (
        {group for site in federation.sites for group in groups[site.splits[part].rows]} for part in ("train", "valid")
    )
    assert not train & valid
    share = sum(len(site.splits["valid"]) for site in federation.sites) / 8667
    assert share == pytest.approx(0.1, abs=0.005)


def test_pbc_is_split_as_documented_and_partitioned(shared_data, tmp_path):
    federation = federation_of(list_source("pbc", shared_data), tmp_path / "store")
    assert {part: len(split) for part, split in federation.common.splits.items()} == {"valid": 1712, "test": 3421}
    assert sum(len(site.splits["train"]) for site in federation.sites) == 11959
    assert len(federation.sites) == 10


def test_real_images_are_cropped_to_the_centre_and_resized(shared_data):
    records = {record.site: record for record in list_source("dermoscopy-prr", shared_data).records}
    with Archives() as archives:
        for site in ("A", "D"):
            pixels = decode(archives.read(records[site].location), 150)
            assert pixels.shape == (3, 150, 150)
            assert 20 < pixels.mean() < 235
        content = archives.read(records["A"].location)
    whole = np.asarray(Image.open(io.BytesIO(content)))
    assert whole.shape == (150, 200, 3)
    assert (decode(content, 150) == whole[:, 25:175].transpose(2, 0, 1)).all()


def test_a_copy_with_lost_images_is_refused_with_their_number_and_names(shared_data, tmp_path):
    for file in shared_data.iterdir():
        if "isic2017" not in file.name:
            os.symlink(file, tmp_path / file.name)
    config = DataConfig(name="dermoscopy-prr", root=tmp_path, store=tmp_path / "stores")
    with pytest.raises(
        UserError, match=r"2000 of 10917 images of dermoscopy-prr are not in .*ISIC_\d{7}.* and 1995 more"
    ):
        load_federation(config, 0)
    assert not (tmp_path / "stores").exists()


# ---- what users bring ----


def test_a_folder_per_class_is_split_7_1_2_within_each_class(tmp_path):
    root = image_files(tmp_path / "mine", {"benign": 40, "malignant/deep": 20})
    federation = load_federation(DataConfig(name=f"folder:{root}", store=tmp_path / "stores", size=8), 0)
    assert federation.classes == ("benign", "malignant")
    (site,) = federation.sites
    assert [site.class_counts(2, part).tolist() for part in ("train", "valid", "test")] == [[28, 14], [4, 2], [8, 4]]


def test_a_partitioned_folder_has_one_common_evaluation_set(tmp_path):
    root = image_files(tmp_path / "mine", {"benign": 60, "malignant": 60})
    config = DataConfig(
        name=f"folder:{root}", store=tmp_path / "stores", size=8, partition="dirichlet_per_class", sites=3, alpha=5
    )
    federation = load_federation(config, 0)
    assert [set(site.splits) for site in federation.sites] == [{"train"}] * 3
    assert len(federation.common.splits["test"]) == 24


@pytest.mark.parametrize(
    ("layout", "settings", "message"),
    [
        ({"one": 3}, {}, "two classes or more"),
        ({"a": 2, "b": 2, "c": 1}, {"classes": ("a", "b")}, "does not name: c"),
        ({"a": 4, "b": 0}, {}, "it has 1 with images \\(a\\); ignored: 1 empty"),
        ({"a": 4, "b": 0}, {"classes": ("a", "b")}, "no image of class 'b' anywhere"),
        ({"a": 0, "b": 0}, {}, "has no images"),
    ],
)
def test_folders_that_cannot_be_classes_are_refused(tmp_path, layout, settings, message):
    root = image_files(tmp_path / "mine", layout)
    with pytest.raises(UserError, match=message):
        load_federation(DataConfig(name=f"folder:{root}", store=tmp_path / "stores", size=8, **settings), 0)


@pytest.fixture
def manifest(tmp_path):
    """Loads a manifest with the given text over ten images per class."""
    image_files(tmp_path, {"a": 10, "b": 10})

    def load(text: str, **settings):
        (tmp_path / "list.csv").write_text(text)
        config = DataConfig(name=f"manifest:{tmp_path / 'list.csv'}", store=tmp_path / "stores", size=8, **settings)
        return load_federation(config, 0)

    return load


def test_a_manifest_without_optional_columns_is_one_site_with_a_stratified_split(manifest):
    lines = [f"{label}/{number}.png,{label}" for label in "ab" for number in range(10)]
    federation = manifest("path,label\n" + "\n".join(lines))
    (site,) = federation.sites
    assert [site.class_counts(2, part).tolist() for part in ("train", "valid", "test")] == [[7, 7], [1, 1], [2, 2]]


def test_a_manifest_with_sites_gives_each_its_own_parts_and_keeps_groups_together(manifest):
    lines = [f"{label}/{n}.png,{label},{'xy'[n % 2]},g{label}{n // 4}" for label in "ab" for n in range(10)]
    federation = manifest("path,label,site,group\n" + "\n".join(lines))
    assert [site.name for site in federation.sites] == ["x", "y"]
    assert federation.common is None
    index = federation.sites[0].splits["train"].store.index
    parts = {}
    for site in federation.sites:
        for part, split in site.splits.items():
            for row in split.rows:
                parts.setdefault(index.groups[row], set()).add(part)
    assert all(len(found) == 1 for found in parts.values())


def test_a_manifests_split_is_used_as_given_under_its_usual_names(manifest):
    names = ["training", "val", "test"]
    lines = [f"{label}/{n}.png,{label},{names[n % 3]}" for label in "ab" for n in range(9)]
    federation = manifest("path,label,split\n" + "\n".join(lines))
    assert Counter({part: len(split) for part, split in federation.sites[0].splits.items()}) == Counter(
        train=6, valid=6, test=6
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label,split\na/0.png,a,train\nb/0.png,b,holdout\n", "line 3: unknown split 'holdout'"),
        ("path,label,split\na/0.png,a,train\nb/0.png,b,\n", "line 3: split is empty, though other lines"),
        ("path,label,site\na/0.png,a,Graz\nb/0.png,b,\n", "line 3: site is empty, though other lines name theirs"),
        ("path,label,split\na/0.png,a,train\na/0.png,a,test\nb/0.png,b,train\n", "more than once.*a/0.png"),
        ("path,label\na/0.png,a\nb/0.png\n", "line 3: path or label is empty"),
        ("path,label\na/0.png,a\n\n\nb/0.png\n", "line 5: path or label is empty"),
        ("path,label\na/0.png,a\n./a/0.png,a\nb/0.png,b\n", r"more than once.*a/0\.png = \./a/0\.png"),
        ("path,label\na/0.png,a\nb/../a/0.png,a\nb/0.png,b\n", r"more than once.*a/0\.png = b/\.\./a/0\.png"),
        ("path,label\na/0.png,a\nb/0.png,b,train\n", r"line 3: 3 values under 2 columns.*double quotes"),
        ("path,label,site\na/0.png,a,Graz\nb/0.png,b,Graz, Austria\n", "line 3: 4 values under 3 columns"),
        ("", "is empty; its first line should name the columns path, label"),
        ("\n\n", "is empty"),
        ("path,label\na/0.png,a\na/1.png,a\n", "one class only"),
        ("file,label\na/0.png,a\n", "no column path; it has file, label"),
        ("path|label\na/0.png|a\n", "it has path.label; it seems to separate values by bars: save it with commas"),
        ("Path,label\na/0.png,a\n", "the column 'Path' should be called 'path'"),
        ("path,label,SITE\na/0.png,a,x\n", "the column 'SITE' should be called 'site'"),
        ("path,label,label\na/0.png,a,b\n", "more than one column label"),
        ("path,label\na/0.png,a\nb/0.png,B\nb/1.png,b \n", r"classes .*: 'B' \(line 3\) and 'b' \(line 4\)"),
        ("path,label\na/0.png,a b\nb/0.png,a  b\n", r"'a b' \(line 2\) and 'a  b' \(line 3\)"),
        ("path,label\na/0.png,a\u0308\nb/0.png,\xe4\n", r"'a\\u0308' \(line 2\) and '\\xe4' \(line 3\)"),
        ("path,label,site\na/0.png,a,Graz\nb/0.png,b,graz\n", r"sites .*: 'Graz' \(line 2\) and 'graz' \(line 3\)"),
        ("path,label\n", "lists no images"),
        ("path,label\na/0.png,a\nb/77.png,b\n", r"1 of 2 images .*do not exist \(paths start in .*\): b/77.png"),
    ],
)
def test_manifests_with_mistakes_are_refused_with_the_place(manifest, text, message):
    with pytest.raises(UserError, match=message):
        manifest(text)


def test_a_manifest_in_another_encoding_is_refused_with_the_line(manifest, tmp_path):
    with pytest.raises(UserError, match="one class only"):
        manifest("\ufeffpath,label\na/0.png,a\n")
    (tmp_path / "latin.csv").write_bytes("path,label\na/0.png,a\nb/0.png,Hämangiom\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.csv, line 3: the text is not UTF-8; save the file in that encoding"):
        load_federation(DataConfig(name=f"manifest:{tmp_path / 'latin.csv'}", store=tmp_path / "stores"), 0)


def test_empty_cells_at_the_end_of_a_line_and_quoted_commas_are_no_mistake(manifest):
    lines = [f'{c}/{i}.png,{c},"Graz, Austria",,' for c in "ab" for i in range(10)]
    assert [site.name for site in manifest("path,label,site\n" + "\n".join(lines)).sites] == ["Graz, Austria"]


def test_spaces_around_the_values_of_a_manifest_do_not_count(manifest):
    lines = [
        f"{label}/{n}.png , {label}{' ' * (n % 2)}, {'x' if n % 3 else ' x '}" for label in "ab" for n in range(10)
    ]
    federation = manifest(" path,label , site\n" + "\n".join(lines))
    assert federation.classes == ("a", "b")
    assert [site.name for site in federation.sites] == ["x"]


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("Melanoma ", "melanoma", r"'Melanoma ' \(Melanoma /0\.png\) and 'melanoma' \(melanoma/0\.png\)"),
        ("a\u0308", "\xe4", r"'a\\u0308' .* and '\\xe4' "),
    ],
)
def test_class_folders_of_nearly_one_name_are_refused_with_a_file_of_each(tmp_path, first, second, shown):
    root = image_files(tmp_path / "mine", {first: 2, second: 2, "nevus": 2})
    with pytest.raises(UserError, match=rf"classes that differ only in case, spaces or form of Unicode: {shown}"):
        load_federation(DataConfig(name=f"folder:{root}", store=tmp_path / "stores", size=8), 0)


def test_classes_that_the_config_lists_may_be_of_nearly_one_name(tmp_path):
    root = image_files(tmp_path / "letters", {"A": 9, "a": 9})
    config = DataConfig(name=f"folder:{root}", classes=("A", "a"), store=tmp_path / "stores", size=8)
    assert load_federation(config, 0).classes == ("A", "a")


def test_the_site_of_a_folder_is_named_whatever_way_leads_there(tmp_path, monkeypatch):
    monkeypatch.chdir(image_files(tmp_path / "clinic", {"a": 9, "b": 9}) / "a")
    federation = load_federation(DataConfig(name="folder:..", store=tmp_path / "stores", size=8), 0)
    assert [site.name for site in federation.sites] == ["clinic"]


def test_a_class_folder_keeps_the_spaces_of_its_name_with_a_warning(tmp_path):
    root = image_files(tmp_path / "mine", {"melanoma ": 9, "nevus": 9})
    federation = load_federation(DataConfig(name=f"folder:{root}", store=tmp_path / "stores", size=8), 0)
    assert federation.classes == ("melanoma ", "nevus")
    assert federation.warnings == ("names of folders keep the spaces around them: 'melanoma '",)


def test_images_left_out_are_named_to_their_owner_but_not_to_a_server(manifest):
    lines = [f"{label}/{n}.png,{label}" for label in "ab" for n in range(10 if label == "a" else 17)]
    owner = manifest("path,label\n" + "\n".join(lines), skip_unreadable=True)
    names = ", ".join(f"b/{n}.png" for n in range(10, 15))
    assert owner.warnings == (f"7 missing or unreadable images were left out: {names} and 2 more",)
    assert owner.sites[0].splits["train"].store.index.facts["left_out"] == [f"b/{n}.png" for n in range(10, 17)]
    store = owner.sites[0].splits["train"].store
    hospital = assemble(store, DataConfig(name=owner.name), 0, whole=False)
    assert hospital.warnings == ("7 missing or unreadable images were left out",)
    index = owner.sites[0].splits["train"].store.index
    earlier = replace(index, facts=index.facts | {"warnings": list(owner.warnings)})
    assert earlier.warnings(with_names=False) == list(hospital.warnings), "stores that hold the names in their text"


def test_one_image_in_two_class_folders_is_refused(tmp_path):
    root = image_files(tmp_path / "mine", {"benign": 3, "malignant": 3})
    (root / "malignant" / "link.png").symlink_to(root / "benign" / "0.png")
    with pytest.raises(UserError, match=r"more than once.*benign/0\.png = malignant/link\.png"):
        load_federation(DataConfig(name=f"folder:{root}", store=tmp_path / "stores", size=8), 0)


@pytest.mark.parametrize("name", ["phantom", "pbc"])
def test_a_class_list_for_a_source_with_classes_of_its_own_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=rf"data\.classes has no effect on {name}"):
        load_federation(DataConfig(name=name, store=tmp_path, classes=("a", "b")), 0)


def test_labels_outside_the_class_list_are_refused(manifest):
    with pytest.raises(UserError, match="does not name: b"):
        manifest("path,label\na/0.png,a\nb/0.png,b\n", classes=("a", "c"))
    with pytest.raises(UserError, match="labels outside a, b: wrong"):
        Listing("x", ("a", "b"), (Record("wrong", None, 2, "s", "g"),))


# ---- names ----


def published_sources() -> list[str]:
    return [name for name in sources.known() if hasattr(sources.load_kind(name), "LICENCE")]


def test_every_source_file_is_a_source_and_says_what_it_is():
    assert all(sources.known().values())
    published = published_sources()
    assert len(published) >= 10
    for name in published:
        assert sources.terms(name).keys() == {"licence", "obtain"}, name
        assert "https://" in sources.terms(name)["obtain"]
    assert sources.terms("folder:images") == {}


def test_the_terms_of_a_data_set_are_told_before_its_images_are_at_hand(tmp_path):
    told = CliRunner().invoke(data_app, ["inspect", "oct", "--set", f"store={tmp_path}"])
    assert isinstance(told.exception, UserError)
    assert "licence: CC BY-NC-SA 4.0" in told.output and "retinal-oct-c8" in told.output


def test_the_page_about_data_has_the_terms_of_every_published_data_set():
    page = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    terms = page.split("| source | licence |")[1].split("\n\n")[0]
    rows = {line.split("`")[1]: line for line in terms.splitlines() if line.startswith("| `")}
    for name in published_sources():
        assert sources.terms(name)["licence"] in rows[name], name
        assert all(link in rows[name] for link in re.findall(r"https://[^\s,;:()]+", sources.terms(name)["obtain"])), (
            name
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("isic", "unknown data 'isic'; did you mean isic2019"),
        ("folder", "folder:PATH"),
        ("pbc:there", "should be written pbc"),
    ],
)
def test_an_unknown_source_is_answered_with_the_known_ones(name, message):
    with pytest.raises(UserError, match=message):
        load_federation(DataConfig(name=name), 0)


def test_an_unprepared_source_is_answered_with_the_command_to_prepare_it(tmp_path):
    with pytest.raises(UserError, match="equipoise data prepare pbc --from DIR"):
        load_federation(DataConfig(name="pbc", store=tmp_path), 0)
    unusual = DataConfig(name="pbc", store=tmp_path / "my stores", size=32, crop="squash", colour_constancy=True)
    with pytest.raises(UserError) as problem:
        load_federation(unusual, 0)
    _, prepare, _ = str(problem.value).split("`")
    options = ["--size", "32", "--set", "crop=squash", "--set", "colour_constancy=true", "--set"]
    assert shlex.split(prepare)[6:] == [*options, f"store={unusual.store}"]
    with pytest.raises(UserError, match="not a folder"):
        load_federation(DataConfig(name="pbc", store=tmp_path, root=tmp_path / "nowhere"), 0)
