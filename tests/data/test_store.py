"""Stores: packed images read row by row, prepared from raw files of every kind, resumed after a kill."""

import io
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from equipoise.core.errors import UserError
from equipoise.data import DataConfig, PhantomConfig, load_federation, prepare
from equipoise.data.augment import even_brightness, shades_of_grey
from equipoise.data.raw import decode
from equipoise.data.sources.phantom import build

CLASSES = ("first", "second")


@pytest.fixture
def raw(tmp_path) -> Path:
    """A folder of two classes with 300 tiny images of known colour: more than two batches."""
    for number in range(300):
        folder = tmp_path / "raw" / CLASSES[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 8), (number % 256, number // 256, 7)).save(folder / f"{number:03d}.png")
    return tmp_path / "raw"


def config_for(raw: Path, **settings) -> DataConfig:
    return DataConfig(name=f"folder:{raw}", store=raw.parent / "stores", size=8, **settings)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    output = io.BytesIO()
    image.save(output, kind, **options)
    return output.getvalue()


def test_rows_come_back_in_the_order_asked_for_and_writing_to_them_leaves_the_store_alone(tmp_path):
    store = build(PhantomConfig(images=50, size=16), tmp_path)
    images = store.images(np.array([4, 1, 4]))
    assert (images[0] == images[2]).all()
    assert (images[1].numpy() == store.packed[1]).all()
    images.zero_()
    assert store.packed[4].any()
    assert not store.packed.flags.writeable


def test_a_pickled_store_is_its_folder_and_maps_the_file_again(tmp_path):
    store = build(PhantomConfig(images=50, size=16), tmp_path)
    assert store.packed.any()
    content = pickle.dumps(store)
    assert len(content) < 500
    copy = pickle.loads(content)
    assert isinstance(copy.packed, np.memmap)
    assert (copy.packed == store.packed).all()
    assert copy.index.names == store.index.names


@pytest.mark.parametrize("file", ["index.json", "images.npy"])
def test_a_damaged_store_is_named(tmp_path, file):
    store = build(PhantomConfig(images=50, size=16), tmp_path)
    (store.folder / file).write_text("{")
    with pytest.raises(UserError, match=str(store.folder)):
        load_federation(DataConfig(store=tmp_path, phantom=PhantomConfig(images=50, size=16)), 0)


def test_prepared_rows_hold_the_image_that_the_index_names(raw):
    store = prepare.prepare(config_for(raw), workers=2, progress=False)
    assert len(store.index) == 300
    for name, row, label in zip(store.index.names, store.index.rows, store.index.labels):
        number = int(Path(name).stem)
        assert store.packed[row][:, 4, 4].tolist() == [number % 256, number // 256, 7]
        assert label == number % 2


def test_zipped_and_unpacked_images_give_the_same_store(raw, tmp_path):
    zipped = tmp_path / "zipped"
    for folder in raw.iterdir():
        (zipped / folder.name).mkdir(parents=True)
        with zipfile.ZipFile(zipped / folder.name / "images.zip", "w") as archive:
            for file in sorted(folder.iterdir()):
                archive.write(file, file.name)
    first, second = (prepare.prepare(config_for(folder), progress=False) for folder in (raw, zipped))
    assert (first.packed == second.packed).all()
    assert (first.index.labels == second.index.labels).all()


def test_preparing_again_does_nothing_until_an_image_changes(raw, monkeypatch):
    config = config_for(raw)
    prepare.prepare(config, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "decode_fully", lambda *_: pytest.fail("decoded again"))
        prepare.prepare(config, progress=False)
    Image.new("RGB", (10, 8), (1, 2, 3)).save(raw / "first" / "000.png")
    store = prepare.prepare(config, progress=False)
    assert store.packed[store.index.rows[store.index.names.index("first/000.png")], :, 4, 4].tolist() == [1, 2, 3]


def test_a_killed_preparation_goes_on_where_it_was(raw):
    config = config_for(raw)
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from equipoise.data import DataConfig, prepare\n"
        "config = DataConfig.model_validate_json(sys.argv[1])\n"
        "decode, done = prepare.decode_fully, prepare.store_folder(config).with_name(\n"
        "    prepare.store_folder(config).name + '.partial') / 'done.txt'\n"
        "def deadly(*arguments):\n"
        "    if done.read_text().count('\\n') >= 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return decode(*arguments)\n"
        "prepare.decode_fully = deadly\n"
        "prepare.prepare(config, workers=1, progress=False)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, config.model_dump_json()], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not prepare.store_folder(config).exists()
    decoded = []
    original = prepare.decode_fully
    try:
        prepare.decode_fully = lambda *arguments: decoded.append(1) or original(*arguments)
        store = prepare.prepare(config, workers=1, progress=False)
    finally:
        prepare.decode_fully = original
    assert 0 < len(decoded) <= 300 - prepare.BATCH
    fresh = prepare.prepare(config.model_copy(update={"store": raw.parent / "fresh"}), progress=False)
    assert (store.packed == fresh.packed).all()
    assert {path.name for path in store.folder.iterdir()} == {"images.npy", "index.json"}


def test_an_unreadable_image_is_named_and_leaves_no_store_behind(raw):
    content = (raw / "second" / "001.png").read_bytes()
    (raw / "second" / "001.png").write_bytes(content[: len(content) // 2])
    config = config_for(raw)
    with pytest.raises(UserError, match=r"1 of 300 images .*second/001\.png.*--skip-unreadable"):
        prepare.prepare(config, progress=False)
    assert not prepare.store_folder(config).exists()
    federation = load_federation(config.model_copy(update={"skip_unreadable": True}), 0)
    assert federation.warnings == ("1 missing or unreadable image was left out: second/001.png",)
    store = federation.sites[0].splits["train"].store
    assert "second/001.png" not in store.index.names
    row = store.index.rows[store.index.names.index("second/003.png")]
    assert store.packed[row, :, 4, 4].tolist() == [3, 0, 7]


def test_what_is_no_image_is_named_by_its_file_not_by_a_python_object(raw):
    (raw / "second" / "001.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"second/001\.png \(no image in a known format\)") as raised:
        prepare.prepare(config_for(raw), progress=False)
    assert "BytesIO" not in str(raised.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_image_with_pixels_that_are_no_numbers_is_named(raw, value):
    pixels = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    pixels[2, 3] = value
    Image.fromarray(pixels).save(raw / "first" / "000.tif")
    with pytest.raises(UserError, match=r"cannot be read: .*first/000\.tif \(it has pixels that are not finite"):
        prepare.prepare(config_for(raw), progress=False)


def test_a_mended_image_is_read_again(raw):
    content = (raw / "first" / "000.png").read_bytes()
    (raw / "first" / "000.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"first/000\.png"):
        prepare.prepare(config_for(raw), progress=False)
    (raw / "first" / "000.png").write_bytes(content)
    assert len(prepare.prepare(config_for(raw), progress=False).index) == 300


def test_a_full_disk_is_reported_and_leaves_no_store(raw, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare, "write_index", full)
    with pytest.raises(UserError, match=r"No space left on device.*data\.store"):
        prepare.prepare(config_for(raw), progress=False)
    assert not prepare.store_folder(config_for(raw)).exists()


def test_colour_constancy_and_crop_have_stores_of_their_own(raw):
    plain, constant, squashed = (
        prepare.prepare(config_for(raw, **settings), progress=False)
        for settings in ({}, {"colour_constancy": True}, {"crop": "squash"})
    )
    assert len({store.folder for store in (plain, constant, squashed)}) == 3
    assert (constant.images(np.arange(300)) == shades_of_grey(plain.images(np.arange(300)), power=6)).all()
    assert (constant.packed != plain.packed).any()


def test_the_centre_is_cropped_and_squashing_keeps_the_edges():
    image = Image.new("RGB", (30, 10), "red")
    image.paste("blue", (10, 0, 20, 10))
    centre, squashed = (decode(encoded(image), 9, crop) for crop in ("centre", "squash"))
    assert (centre == np.array([0, 0, 255])[:, None, None]).all()
    assert np.abs(squashed[:, 4, 0].astype(int) - (255, 0, 0)).max() <= 1


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK", "1", "YCbCr"])
def test_every_colour_mode_of_a_white_image_is_white(mode):
    image = Image.new("RGB", (12, 12), "white").convert(mode)
    pixels = decode(encoded(image, "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"), 8)
    assert pixels.shape == (3, 8, 8)
    assert pixels.dtype == np.uint8
    assert (pixels >= 254).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_becomes_white_and_what_is_not_keeps_its_colour(mode):
    image = Image.new("RGBA", (16, 8), (0, 0, 0, 0))
    image.paste((90, 90, 90, 255), (8, 0, 16, 8))
    pixels = decode(encoded(image.convert(mode)), 8, "squash")
    assert (pixels[:, :, 0] == 255).all()
    assert np.abs(pixels[:, :, -1].astype(int) - 90).max() <= 1


@pytest.mark.parametrize(("brightest", "value", "expected"), [(65535, 32768, 128), (4095, 2048, 128), (200, 100, 100)])
def test_deep_greyscale_is_scaled_by_its_depth_not_clipped(brightest, value, expected):
    grey = np.full((8, 8), value, dtype=np.uint16)
    grey[0] = brightest
    pixels = decode(encoded(Image.fromarray(grey)), 8)
    assert pixels[0, 6, 6] == pytest.approx(expected, abs=1)


def test_a_dark_image_is_as_dark_as_its_file_says():
    dark = np.full(64, 200, dtype=">u2")
    assert decode(b"P5 8 8 65535\n" + dark.tobytes(), 8).max() == 1
    assert decode(b"P5 8 8 4095\n" + dark.tobytes(), 8).max() == 12
    assert decode(twelve_bit_tiff(200), 8).max() == 12


def twelve_bit_tiff(value: int) -> bytes:
    """An even TIFF of 8 x 8 pixels with 12 bits each."""
    fields = {256: 8, 257: 8, 258: 12, 259: 1, 262: 1, 273: 110, 277: 1, 278: 8}
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, number) for tag, number in fields.items())
    head = struct.pack("<2sHIH", b"II", 42, 8, len(fields)) + entries + bytes(4)
    pair = (value << 12 | value).to_bytes(3, "big")
    return head.ljust(110, b"\0") + pair * 32


def test_grey_images_that_seem_of_different_depth_are_reported_even_after_a_kill(raw, monkeypatch):
    def add(name: str, brightest: int) -> None:
        Image.fromarray(np.full((8, 8), brightest, dtype=np.uint16)).save(raw / name)

    add("first/0.png", 4000)
    add("first/1.png", 3000)
    assert load_federation(config_for(raw), 0).warnings == ()
    add("second/9.png", 60000)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_index", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            prepare.prepare(config_for(raw), workers=1, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "decode_fully", lambda *_: pytest.fail("decoded again"))
        (told,) = load_federation(config_for(raw), 0).warnings
    assert "different depths (12, 16 bits)" in told


def test_float_images_are_stretched_to_the_full_range():
    ramp = np.tile(np.linspace(-3, 5, 64, dtype=np.float32), (64, 1))
    pixels = decode(encoded(Image.fromarray(ramp), "TIFF"), 64)
    assert pixels.min() == 0
    assert pixels.max() == 255


def test_the_camera_orientation_is_applied():
    image = Image.new("RGB", (8, 8), "black")
    image.paste("white", (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    upright, turned = decode(encoded(image), 8), decode(encoded(image, exif=exif), 8)
    assert upright[0, 0, 0] == 255
    assert turned[0, 0, 0] == 0
    assert turned[0, -1, 0] == 255


@pytest.mark.parametrize("shape", [(1, 1), (1, 4000), (4000, 3)])
def test_tiny_and_extreme_shapes_become_squares(shape):
    pixels = decode(encoded(Image.new("RGB", shape, (10, 200, 30))), 16)
    assert (pixels == np.array([10, 200, 30])[:, None, None]).all()


def test_even_brightness_brings_all_images_to_one_mean_luma_and_leaves_their_hue():
    random = torch.Generator().manual_seed(0)
    images = torch.randint(20, 90, (4, 3, 16, 16), generator=random, dtype=torch.uint8)
    lit = even_brightness(images)
    luma = (lit.double() * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1).mean((1, 2))
    torch.testing.assert_close(luma, torch.full((4,), 127.5, dtype=torch.float64), rtol=0, atol=0.3)
    ratio = (lit.double() / images.double()).mean((2, 3))
    torch.testing.assert_close(ratio, ratio.mean(1, keepdim=True).expand(4, 3), rtol=5e-3, atol=0)
    assert even_brightness(torch.zeros(1, 3, 4, 4, dtype=torch.uint8)).max() == 0


def test_brightness_comes_before_colour_constancy_and_each_has_a_store_of_its_own(raw):
    plain, even, both = (
        prepare.prepare(config_for(raw, **light), progress=False)
        for light in ({}, {"brightness": True}, {"brightness": True, "colour_constancy": True})
    )
    images = torch.from_numpy(plain.packed.copy())
    assert torch.equal(torch.from_numpy(even.packed.copy()), even_brightness(images))
    assert torch.equal(torch.from_numpy(both.packed.copy()), shades_of_grey(even_brightness(images), power=6))
    assert len({plain.folder, even.folder, both.folder}) == 3


def test_numpy_files_are_images_too():
    output = io.BytesIO()
    np.save(output, np.arange(64, dtype=np.uint8).reshape(8, 8))
    assert (decode(output.getvalue(), 8) == np.arange(64, dtype=np.uint8).reshape(8, 8)).all()


def test_a_store_holds_only_the_columns_that_it_needs(raw):
    """Earlier versions, which do not know the others, can then read it."""
    store = load_federation(config_for(raw), 0).sites[0].splits["train"].store
    known = json.loads((store.folder / "index.json").read_text())
    assert not {"pooled", "extra", "equal"} & set(known)
