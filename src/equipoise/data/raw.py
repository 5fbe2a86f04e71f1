"""Raw image files: found in folders and zip archives, read, and turned into squares of 8-bit RGB."""

import io
import os
import threading
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile

from equipoise.core.errors import UserError
from equipoise.data import volumes
from equipoise.data.dicom import Window, is_dicom, windowed

#: files with several images that stay in memory while these are read
FILES_KEPT = 4
Crop = Literal["centre", "squash"]
ORIENTATION = 0x0112  # of EXIF
TURNED = {5, 6, 7, 8}  # its values that swap width and height
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm"}


class Frame(NamedTuple):
    """One of several images in a file: a frame of DICOM, or a slice of a volume in a plane.

    Args:
        mirrored: left and right are exchanged, as DICOM shows axial slices
    """

    number: int
    plane: volumes.Plane = "axial"
    mirrored: bool = False


@dataclass(frozen=True)
class Location:
    """Where an image is: a file, or a member of a zip file.

    Args:
        stamp: changes when the content does (size and time, or size and checksum in a zip)
        content: the image itself, where its file holds many and is no archive
        frame: which image of the file, where that holds several

    >>> Location(Path("images/1.png")).file.name
    '1.png'
    """

    file: Path
    member: str | None = None
    stamp: str = ""
    content: bytes | None = field(default=None, repr=False)
    frame: Frame | None = None

    @property
    def path(self) -> PurePosixPath:
        """The path that names the image, inside its archive if it is in one."""
        return PurePosixPath(self.member if self.member is not None else self.file.as_posix())

    def __str__(self) -> str:
        place = f"{self.file}" if self.member is None else f"{self.member} in {self.file}"
        return place if self.frame is None else f"image {self.frame.number + 1} of {place}"


def locate(file: Path) -> Location:
    """The location of one plain file."""
    facts = file.stat()
    return Location(file, stamp=f"{facts.st_size}:{facts.st_mtime_ns}")


def walk_images(
    root: Path, suffixes: Collection[str] = SUFFIXES, wanted: Callable[[Path], bool] | None = None
) -> Iterator[Location]:
    """Every image under `root`, in a fixed order: loose files first, then those in zip files.

    Args:
        suffixes: endings of image files, in small letters
        wanted: which loose files are images; default those with such an ending
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder")
    files = _files(root)
    chosen = wanted or (lambda path: path.suffix.lower() in suffixes)
    yield from (locate(path) for path in files if path.suffix.lower() != ".zip" and chosen(path))
    for path in files:
        if path.suffix.lower() == ".zip":
            yield from _walk_zip(path, suffixes)


def _files(root: Path) -> list[Path]:
    """All files under a folder but hidden ones, sorted; a folder that may not be read is refused, not passed over."""

    def refuse(problem: OSError) -> None:
        raise UserError(f"{problem.filename} cannot be read: {(problem.strerror or 'no reason is given').lower()}")

    walked = os.walk(root, onerror=refuse)
    found = (Path(folder, name) for folder, _, names in walked for name in names if not name.startswith("."))
    return sorted(path for path in found if path.is_file())


def _walk_zip(path: Path, suffixes: Collection[str]) -> Iterator[Location]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = sorted(archive.infolist(), key=lambda info: info.filename)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a readable zip file: {error}") from error
    for info in members:
        inside = PurePosixPath(info.filename)
        if inside.name.lower().endswith(tuple(suffixes)) and not inside.name.startswith("."):
            yield Location(path, info.filename, f"{info.file_size}:{info.CRC}")


class Archives:
    """Reads locations, keeping zip files open in between; may be used by several threads."""

    def __init__(self) -> None:
        self._open: dict[Path, zipfile.ZipFile] = {}
        self._lock = threading.Lock()
        self._several: dict[tuple[Path, str | None], bytes] = {}

    def __enter__(self) -> "Archives":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for archive in self._open.values():
            archive.close()

    def read(self, location: Location) -> bytes:
        """The bytes of an image file; the same bytes again for the next image of a file with several."""
        if location.frame is None:
            return self._read(location)
        key = (location.file, location.member)
        content = self._several.get(key)
        if content is None:
            content = self._read(location)
            with self._lock:
                while len(self._several) >= FILES_KEPT:
                    self._several.pop(next(iter(self._several)))
                self._several[key] = content
        return content

    def _read(self, location: Location) -> bytes:
        if location.content is not None:
            return location.content
        if location.member is None:
            return volumes.read_whole(location.file)
        with self._lock:
            if location.file not in self._open:
                self._open[location.file] = zipfile.ZipFile(location.file)
        return self._open[location.file].read(location.member)


def decode(
    content: bytes, size: int, crop: Crop = "centre", window: Window | None = None, frame: Frame | None = None
) -> np.ndarray:
    """An image file as uint8 (3, size, size).

    Args:
        content: bytes of the file
        crop: "centre" takes the central square, "squash" the whole image; then resized (Lanczos)
        window: centre and width of the grey levels of DICOM and NIfTI; default the file's own
        frame: which image of a file with several

    Raises:
        Exception: of many kinds, as Pillow does, when the file is broken
    """
    return decode_fully(content, size, crop, window, frame).pixels


class Decoded(NamedTuple):
    """An image as a store takes it.

    Args:
        pixels: uint8 (3, size, size)
        bits: the depth that a grey image was taken to have by its brightest pixel; None for images of 8 bits, and for
            those whose file tells the depth or whose pixels have none
        whole: width and height of the image, before it became square
    """

    pixels: np.ndarray
    bits: int | None
    whole: tuple[int, int]


def decode_fully(
    content: bytes, size: int, crop: Crop = "centre", window: Window | None = None, frame: Frame | None = None
) -> Decoded:
    """As `decode`, with what else is known of the image."""
    with _opened(content, window, frame) as image:
        whole = image.size[::-1] if image.getexif().get(ORIENTATION, 1) in TURNED else image.size
        image.draft(None, (2 * size, 2 * size))  # large JPEGs are decoded at a fraction of their size
        image.load()
        told = _told_bits(image)
        guessed = _fitting_bits(np.asarray(image)) if _is_deep(image) and told is None else None
        picture = to_rgb(ImageOps.exif_transpose(image), told or guessed)
    return Decoded(to_square(picture, size, crop), guessed, whole)


def to_square(picture: Image.Image, size: int, crop: Literal["centre", "squash"] = "centre") -> np.ndarray:
    """An RGB picture as uint8 (3, size, size): its central square, or the whole of it, resized (Lanczos)."""
    if crop == "centre":
        picture = central_square(picture)
    square = picture.resize((size, size), Image.Resampling.LANCZOS)
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def central_square(picture: Image.Image) -> Image.Image:
    """The largest square in the middle of a picture."""
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.crop((left, top, left + side, top + side))


def _opened(content: bytes, window: Window | None, frame: Frame | None) -> Image.Image:
    if is_dicom(content):
        return Image.fromarray(windowed(content, window, None if frame is None else frame.number))
    if volumes.is_volume_content(content):
        if frame is None:
            raise ValueError("it is a volume, and one slice of it is to be read")
        return Image.fromarray(volumes.shown(content, frame.plane, frame.number, window))
    if content.startswith(np.lib.format.MAGIC_PREFIX):
        return Image.fromarray(np.load(io.BytesIO(content), allow_pickle=False))
    try:
        return Image.open(io.BytesIO(content))
    except UnidentifiedImageError:  # whose message names a Python object instead of the file
        raise ValueError("no image in a known format") from None


def to_rgb(image: Image.Image, bits: int | None = None) -> Image.Image:
    """Any kind of image as 8-bit RGB: grey, palette, CMYK, 16-bit, float; transparency becomes white.

    Args:
        bits: depth of a grey image of more than 8 bits, if known
    """
    if _is_deep(image):
        return Image.fromarray(_to_8_bits(np.asarray(image), bits)).convert("RGB")
    if image.has_transparency_data:
        coloured = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), coloured).convert("RGB")
    return image.convert("RGB")


def _is_deep(image: Image.Image) -> bool:
    """Whether an image is grey with more than 8 bits, whole numbers or not."""
    return image.mode == "F" or image.mode.startswith("I")


def _told_bits(image: Image.Image) -> int | None:
    """The depth that the file itself tells; one that says 16 bits may hold fewer, as many scanners' do."""
    if image.format == "PPM" and image.mode == "I":  # its header has the largest value; Pillow makes that 65535
        return 16
    if isinstance(image, TiffImageFile) and image.tag_v2.get(BITSPERSAMPLE) == (12,):
        return 12
    return None


def _fitting_bits(values: np.ndarray) -> int | None:
    """8, 12 or 16 bits, whichever hold the brightest of some whole numbers; None for other pixels."""
    if values.min() < 0 or (values != np.round(values)).any():
        return None
    return next((bits for bits in (8, 12, 16) if values.max() < 2**bits), None)


def _to_8_bits(values: np.ndarray, bits: int | None) -> np.ndarray:
    """Grey values of more than 8 bits, scaled to 0..255.

    Whole numbers are scaled by their depth, so that brightness stays comparable between images. The depth is the
    one that the file tells, else 8, 12 or 16 bits, whichever hold the brightest pixel: 12-bit scanners write files
    of 16 bits. The guess uses one image alone, so that an image looks the same in training and in later use; `prepare`
    warns where guesses differ within a source. Anything else is
    stretched from its own darkest to its own brightest pixel.

    Raises:
        ValueError: for pixels that are NaN or infinite
    """
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it has pixels that are not finite numbers")
    bits = bits or _fitting_bits(values)
    low, high = (0.0, 2.0**bits - 1) if bits else (float(values.min()), float(values.max()))
    return np.round((values - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
