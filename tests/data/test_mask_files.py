"""Masks in files: what pairs with which image, what values mean, and how a mask becomes square beside its image."""

import zlib

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from equipoise.core.errors import UserError
from equipoise.data import DataConfig, Federation, load_federation
from equipoise.data.masks import as_classes, square_mask
from equipoise.data.raw import to_square
from equipoise.engine.loop import Run
from equipoise.engine.runs import decided_by_data, make_config
from equipoise.methods import get_method
from harness import events

RANDOM = np.random.default_rng(0)
WIDTH, HEIGHT = 30, 20


def scene(number):
    """A dark image with a bright block, and where the block is (H, W)."""
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    top, left = number % 8, 5 + number % 12
    mask[top : top + 10, left : left + 9] = 1
    image = RANDOM.integers(0, 60, (HEIGHT, WIDTH, 3)) + 150 * mask[..., None]
    return image.astype(np.uint8), mask


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def pairs(root, count=12, white=255, image="images/{}.png", mask="masks/{}.png"):
    for number in range(count):
        pixels, shown = scene(number)
        write(root / image.format(number), pixels)
        write(root / mask.format(number), shown * np.uint8(white))
    return root


def federation_of(name, tmp_path, **settings):
    return load_federation(DataConfig(name=name, store=tmp_path / "stores", **({"size": 16} | settings)), 0)


def everything(federation):
    """All images (N, 3, H, W) and masks (N, H, W) of a federation."""
    splits = [split for site in federation.places() for split in site.splits.values()]
    where = [(split, np.arange(len(split))) for split in splits]
    return (
        np.concatenate([getattr(split, kind)(all_).numpy() for split, all_ in where]) for kind in ("images", "masks")
    )


def shows_blocks(federation):
    """Whether masks lie where images are bright, but for pixels at borders that resizing mixes."""
    images, masks = everything(federation)
    bright = images.mean(axis=1) > 110
    return (bright == (masks == 1)).mean() > 0.95 and masks.any()


# ---- pairs of files ----


@pytest.mark.parametrize(
    ("image", "mask", "settings"),
    [
        ("images/{}.png", "masks/{}.png", {}),
        ("images/{}.jpg", "masks/{}_segmentation.png", {}),
        ("Bern/images/{}.png", "Bern/masks/{}.png", {}),
        ("images/train/{}.png", "labels/train/{}.png", {}),
        ("all/{}.png", "all/{}_mask.png", {"masks": True}),
        ("{}.png", "{}-seg.png", {"masks": True}),
    ],
)
def test_images_are_paired_with_their_masks(tmp_path, image, mask, settings):
    root = pairs(tmp_path / "mine", image=image, mask=mask)
    federation = federation_of(f"folder:{root}", tmp_path, **settings)
    assert federation.task == "segmentation"
    assert federation.classes == ("background", "foreground")
    assert shows_blocks(federation)


def test_levels_of_folders_are_sites_parts_and_patients(tmp_path):
    for site in ("Bern", "Graz"):
        for part in ("train", "val", "test"):
            for patient in ("p1", "p2"):
                where = f"{site}/{{}}/{part}/{patient}/{site}{part}{patient}".replace("{}", "KIND") + "{}.png"
                pairs(tmp_path / "mine", 2, image=where.replace("KIND", "images"), mask=where.replace("KIND", "masks"))
    federation = federation_of(f"folder:{tmp_path / 'mine'}", tmp_path)
    assert [site.name for site in federation.sites] == ["Bern", "Graz"]
    assert {part: len(split) for part, split in federation.sites[0].splits.items()} == dict.fromkeys(
        ("train", "valid", "test"), 4
    )
    assert set(federation.sites[1].splits["train"].groups()) == {"Graz/p1", "Graz/p2"}


def test_an_image_without_a_mask_is_named_and_may_be_left_out(tmp_path):
    root = pairs(tmp_path / "mine")
    (root / "masks/3.png").unlink()
    (root / "masks/99.png").write_bytes((root / "masks/4.png").read_bytes())
    with pytest.raises(UserError, match=r"1 of 12 images .* images/3.png \(its mask\)"):
        federation_of(f"folder:{root}", tmp_path)
    federation = federation_of(f"folder:{root}", tmp_path, skip_unreadable=True)
    assert sum(len(split) for site in federation.sites for split in site.splits.values()) == 11
    assert any("1 masks without an image were skipped: 99.png" in text for text in federation.warnings)


def test_two_masks_of_one_image_are_refused(tmp_path):
    root = pairs(tmp_path / "mine")
    write(root / "masks/3.bmp", scene(3)[1])
    with pytest.raises(UserError, match="unclear which mask is whose"):
        federation_of(f"folder:{root}", tmp_path)


def test_folders_called_images_and_masks_may_be_read_as_classes(tmp_path):
    root = pairs(tmp_path / "mine")
    assert federation_of(f"folder:{root}", tmp_path, masks=False).classes == ("images", "masks")


def test_a_manifest_names_masks_in_a_column(tmp_path):
    root = pairs(tmp_path, image="a/{}.png", mask="b/{}.png")
    rows = [f"a/{n}.png;b\\{n}.png;{'north' if n % 2 else 'south'};p{n // 2};{30 + n}" for n in range(12)]
    (root / "list.csv").write_text("\n".join(["path;mask;site;group;age", *rows]))
    federation = federation_of(f"manifest:{root / 'list.csv'}", tmp_path, classes=("skin", "lesion"))
    assert federation.task == "segmentation" and federation.classes == ("skin", "lesion")
    assert [site.name for site in federation.sites] == ["south", "north"]
    assert federation.sites[0].splits["train"].store.index.extra["age"][0] == "30"
    assert shows_blocks(federation)
    (root / "list.csv").write_text("path,mask\na/0.png,\n")
    with pytest.raises(UserError, match="line 2: path or mask is empty"):
        federation_of(f"manifest:{root / 'list.csv'}", tmp_path)


# ---- volumes ----


def volume_pair(folder, name, slices=6, suffix=".nii.gz"):
    nibabel = pytest.importorskip("nibabel", reason="needs equipoise[medical]")
    folder.mkdir(parents=True, exist_ok=True)
    mask = np.zeros((20, 20, slices), dtype=np.uint8)
    mask[4:12, 6:16, 1:-1] = 1
    voxels = RANDOM.normal(100, 5, mask.shape) + 100 * mask
    affine = np.diag([-1.0, 2.0, -1.0, 1.0])
    nibabel.save(nibabel.Nifti1Image(voxels.astype(np.float32), affine), folder / f"{name}{suffix}")
    nibabel.save(nibabel.Nifti1Image(mask, affine), folder / f"{name}_segmentation{suffix}")


def test_a_volume_is_cut_together_with_the_mask_beside_it_and_is_a_group(tmp_path):
    for site in ("north", "south"):
        for number in range(5):
            volume_pair(tmp_path / "mine" / site, f"Case{number:02d}")
    federation = federation_of(f"folder:{tmp_path / 'mine'}", tmp_path, masks=True)
    assert [site.name for site in federation.sites] == ["north", "south"]
    assert shows_blocks(federation)
    split = federation.sites[0].splits["train"]
    names, counts = np.unique(split.groups(), return_counts=True)
    assert set(counts) == {6} and names[0].startswith("north/Case")
    flat = ~split.masks(np.arange(len(split))).numpy().any(axis=(1, 2))
    assert flat.sum() == 2 * len(names), "the first and last slice of each volume show nothing"


# ---- values and squares ----


@pytest.mark.parametrize(
    ("values", "classes", "expected"),
    [
        ([0, 255], "ab", [0, 1]),
        ([0, 1], "ab", [0, 1]),
        ([0, 0], "ab", [0, 0]),
        ([255, 255], "ab", [1, 1]),
        ([0, 2], "abc", [0, 2]),
        ([0.0, 1.0], "ab", [0, 1]),
        ([False, True], "ab", [0, 1]),
    ],
)
def test_values_of_masks_have_one_meaning(values, classes, expected):
    assert as_classes(np.array([values]), list(classes)).tolist() == [expected]


@pytest.mark.parametrize(
    ("values", "classes", "message"),
    [
        ([0, 3, 252, 255], "ab", "has the values 0, 3, 252, 255, but masks of 2 classes .* have 0 and 255, or 0 and 1"),
        ([0, 255], "abc", "have 0 to 2"),
        ([-1, 0], "ab", "has the values -1, 0"),
        ([0.5, 1], "ab", "no whole numbers"),
    ],
)
def test_other_values_are_refused_with_the_rule(values, classes, message):
    with pytest.raises(ValueError, match=message):
        as_classes(np.array([values]), list(classes))


@pytest.mark.parametrize("crop", ["centre", "squash"])
@pytest.mark.parametrize("size", [8, 20, 45])
def test_a_mask_is_cut_and_resized_as_its_image(crop, size):
    mask = np.zeros((20, 32), dtype=np.uint8)
    mask[5:15, 8:20] = 1
    picture = Image.fromarray(np.repeat(mask[..., None] * np.uint8(255), 3, axis=2))
    image = to_square(picture, size, crop)[0]
    square = square_mask(mask, size, crop, (32, 20))
    assert set(np.unique(square)) <= {0, 1}
    assert ((image > 127) == square).mean() > 0.93
    clear = (image < 5) | (image > 250)
    assert ((image > 127) == square)[clear].all()


def test_a_mask_of_another_size_is_unreadable_with_both_sizes(tmp_path):
    root = pairs(tmp_path / "mine")
    write(root / "masks/3.png", np.zeros((HEIGHT, HEIGHT), dtype=np.uint8))
    with pytest.raises(UserError, match="the mask has 20x20 pixels, but its image 30x20"):
        federation_of(f"folder:{root}", tmp_path)


def test_an_image_that_a_camera_turned_is_as_large_as_its_mask(tmp_path):
    root = pairs(tmp_path / "mine", image="images/{}.jpg")
    for number in range(12):
        turned = Image.fromarray(np.rot90(scene(number)[0]))  # EXIF 6 turns it back, clockwise
        exif = turned.getexif()
        exif[0x0112] = 6
        turned.save(root / f"images/{number}.jpg", exif=exif, quality=95)
    assert shows_blocks(federation_of(f"folder:{root}", tmp_path))


def test_masks_with_more_structures_need_their_names(tmp_path):
    root = pairs(tmp_path / "mine", white=1)
    write(root / "masks/3.png", scene(3)[1] * np.uint8(2))
    with pytest.raises(UserError, match=r"name all structures in data\.classes"):
        federation_of(f"folder:{root}", tmp_path)
    federation = federation_of(f"folder:{root}", tmp_path, classes=("background", "block", "other"))
    assert (federation.class_counts() + federation.class_counts("valid") + federation.class_counts("test") > 0).all()


def test_a_structure_that_no_mask_shows_is_refused(tmp_path):
    root = pairs(tmp_path / "mine", white=1)
    with pytest.raises(UserError, match="no pixel of structure 'other' anywhere"):
        federation_of(f"folder:{root}", tmp_path, classes=("background", "block", "other"))


def test_a_killed_preparation_goes_on_with_its_masks(tmp_path, monkeypatch):
    from equipoise.data import prepare

    root = pairs(tmp_path / "mine")
    monkeypatch.setattr(prepare, "BATCH", 5)
    expected = [array.copy() for array in everything(federation_of(f"folder:{root}", tmp_path / "whole"))]
    config = DataConfig(name=f"folder:{root}", store=tmp_path / "stores", size=16)
    original, calls = prepare.decode_mask, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) > 7:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(prepare, "decode_mask", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(config, workers=1, progress=False)
    calls.clear()
    monkeypatch.setattr(prepare, "decode_mask", lambda *arguments: calls.append(1) or original(*arguments))
    found = everything(federation_of(f"folder:{root}", tmp_path))
    assert len(calls) == 7, "the five of the first batch are not decoded again"
    assert all((one == other).all() for one, other in zip(found, expected))


# ---- from Python ----


def test_arrays_and_a_frame_make_the_same_masks_as_files(tmp_path):
    scenes = [scene(number) for number in range(12)]
    images, masks = (np.stack(arrays) for arrays in zip(*scenes))
    for number, (image, mask) in enumerate(scenes):
        write(tmp_path / f"i/{number}.png", image)
        write(tmp_path / f"m/{number}.png", mask * np.uint8(255))
    group = [f"p{number // 2}" for number in range(12)]
    settings = {"size": 16, "store": tmp_path / "stores"}
    given = Federation.from_arrays(images, masks=masks, group=group, **settings)
    table = pd.DataFrame(
        {"path": [f"i/{n}.png" for n in range(12)], "m": [f"m/{n}.png" for n in range(12)], "who": group}
    )
    listed = Federation.from_frame(table, mask="m", group="who", root=tmp_path, **settings)
    assert given.task == listed.task == "segmentation"
    for one, other in zip(everything(given), everything(listed)):
        assert (one == other).all()
    assert shows_blocks(given)
    changed = Federation.from_arrays(images, masks=masks[::-1], group=group, **settings)
    assert changed.config.name != given.config.name


def test_from_arrays_refuses_masks_that_do_not_fit(tmp_path):
    images = np.zeros((4, 16, 16, 3), dtype=np.uint8)
    masks = np.zeros((4, 16, 16), dtype=np.uint8)
    for arguments, message in (
        ({"masks": masks, "labels": [0, 1, 0, 1]}, "and not both"),
        ({}, "give labels"),
        ({"masks": masks[:3]}, "4 images but 3 masks"),
        ({"masks": masks[:, :8]}, "image 0: the mask has 16x8 pixels"),
        ({"masks": masks + 7}, "image 0: the mask has the values 7"),
    ):
        with pytest.raises(UserError, match=message):
            Federation.from_arrays(images, store=tmp_path, **arguments)


# ---- MetaImage and NRRD ----


def test_metaimage_and_nrrd_show_the_slices_of_the_same_nifti_volume(made_up, tmp_path):
    nibabel = pytest.importorskip("nibabel", reason="needs equipoise[medical]")
    from equipoise.data import volumes

    voxels = RANDOM.integers(0, 1000, (6, 7, 4))
    lps = np.diag([-0.5, -0.5, 3.0, 1.0])
    lps[:3, 3] = -5, -6, 7
    file = nibabel.Nifti1Image(voxels.astype(np.int16), lps).to_bytes()
    others = [tmp_path / name for name in ("a.mha", "b.mhd", "c.nrrd")]
    for path in others:
        (made_up.nrrd if path.suffix == ".nrrd" else made_up.metaimage)(path, voxels)
    head, mark, data = others[0].read_bytes().partition(b"LOCAL\n")
    packed = head.replace(b"CompressedData = False", b"CompressedData = True") + mark + zlib.compress(data)
    for content in (packed, *map(volumes.read_whole, others)):
        assert volumes.is_volume_content(content)
        for number in range(4):
            assert (volumes.values(content, "axial", number) == volumes.values(file, "axial", number)).all()
            assert (volumes.shown(content, "axial", number) == volumes.shown(file, "axial", number)).all()
    assert [volumes.slices(path, "axial") for path in others] == [4, 4, 4]


def test_volumes_with_masks_train_a_net_that_finds_what_they_show(tmp_path):
    for site in ("north", "south"):
        for number in range(6):
            volume_pair(tmp_path / "mine" / site, f"Case{number:02d}")
    name, store = f"folder:{tmp_path / 'mine'}", tmp_path / "stores"
    settings = (f"data.name='{name}'", f"data.store='{store}'", "data.masks=true", "data.size=16", "train.rounds=4")
    config = make_config(None, [*settings, "train.optimiser.name='adam'", "train.optimiser.lr=0.005"])
    federation = load_federation(config.data, config.seed)
    Run(decided_by_data(config, federation), get_method("fedavg"), federation, tmp_path / "run").execute()
    final = next(event for event in events(tmp_path / "run") if event["event"] == "final" and event["scope"] == "mean")
    assert final["metrics"]["dice"] > 0.8
