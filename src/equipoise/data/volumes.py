"""Volumes (NIfTI, MetaImage, NRRD) as 8-bit slices. nibabel is imported when a file is read.

A volume is turned so that its axes run to the right, to the front and to the head, and then cut into slices.
"""

import gzip
import io
import re
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np

from equipoise.core.errors import UserError, install
from equipoise.data import metaimage
from equipoise.data.data_config import Plane

PLANES = get_args(Plane)  # by the axis that they cut
SUFFIXES = (".nii", ".nii.gz", *metaimage.SUFFIXES)
#: what the names of masks end in, after the name of their volume
MASK = re.compile(r"[_-](mask|seg|segmentation|labels?|gt|ground_?truth)$", re.IGNORECASE)
#: shares of a volume's voxels that are darker than black and not darker than white
DARKEST, BRIGHTEST = 0.005, 0.995
COMPRESSED = b"\x1f\x8b"


def is_volume_content(content: bytes) -> bool:
    """Whether a file, compressed or not, says that it is a volume: NIfTI by its mark behind the header."""
    if metaimage.recognises(content):
        return True
    if content.startswith(COMPRESSED):
        with gzip.open(io.BytesIO(content)) as opened:
            content = opened.read(348)
    return content[344:348] in (b"n+1\0", b"n+2\0") or content[4:8] == b"n+2\0"


def is_volume(name: str) -> bool:
    """Whether a file is named like a volume."""
    return name.lower().endswith(SUFFIXES)


def is_installed() -> bool:
    """Whether nibabel is."""
    return find_spec("nibabel") is not None


def is_mask(file: Path) -> bool:
    """Whether a file is named after a volume beside it, as its mask."""
    return volume_of_mask(file) is not None


def volume_of_mask(file: Path) -> Path | None:
    """The volume beside a file that is named after it, as its mask."""
    own = stem(file.name)
    volume = MASK.sub("", own)
    candidates = (file.parent / f"{volume}{suffix}" for suffix in SUFFIXES) if volume != own else ()
    return next((path for path in candidates if path.is_file()), None)


def slices(source: Path | bytes, plane: Plane) -> int:
    """How many slices a volume has; no voxels are read."""
    package, image = _opened(source)
    shape = package.as_closest_canonical(image).shape if image.ndim == 3 else ()
    return shape[PLANES.index(plane)] if shape else 1


def shown(content: bytes, plane: Plane, number: int, window: tuple[float, float] | None = None) -> np.ndarray:
    """One slice as uint8 (H, W), the front of the body on top, or its head.

    Args:
        window: centre and width of the levels that become 0 to 255; default nearly all levels of the volume

    Raises:
        ValueError: for what has not three dimensions
    """
    return np.rot90(_levels(content, window).take(number, axis=PLANES.index(plane)))


@lru_cache(maxsize=4)  # slices of a volume are read one after the other, perhaps by several threads
def _levels(content: bytes, window: tuple[float, float] | None) -> np.ndarray:
    """A whole volume, uint8. Without a window the few darkest and brightest voxels are clipped."""
    voxels = _voxels(content, np.float32)
    if not np.isfinite(voxels).all():
        raise ValueError("it has voxels that are not finite numbers")
    if window:
        low, high = window[0] - window[1] / 2, window[0] + window[1] / 2
    else:
        low, high = np.quantile(voxels, (DARKEST, BRIGHTEST))
        if low == high:
            low, high = voxels.min(), voxels.max()
    return np.round(np.clip((voxels - low) / max(high - low, 1e-12), 0, 1) * 255).astype(np.uint8)


def values(content: bytes, plane: Plane, number: int) -> np.ndarray:
    """One slice as its voxels are (H, W), turned as `shown` turns it: for masks."""
    return np.rot90(_kept(content).take(number, axis=PLANES.index(plane)))


def marked(source: Path, plane: Plane) -> np.ndarray:
    """Which slices of a mask show something (n,): bool."""
    voxels = _voxels(read_whole(source))
    others = tuple(axis for axis in range(3) if axis != PLANES.index(plane))
    return np.asarray((voxels > 0).any(axis=others))


def _voxels(content: bytes, kind: type | None = None) -> np.ndarray:
    """A volume's voxels (X, Y, Z), turned; of a kind of numbers, or of that of the file."""
    package, image = _opened(content)
    if image.ndim != 3:
        raise ValueError(f"an image of {image.ndim} dimensions; split it into volumes of 3")
    return np.asarray(package.as_closest_canonical(image).dataobj, dtype=kind)


_kept = lru_cache(maxsize=4)(_voxels)


def read_whole(file: Path) -> bytes:
    """The bytes of a file; of a .mhd file with its voxels, which lie in a file beside it."""
    return metaimage.whole(file) if file.suffix.lower() == ".mhd" else file.read_bytes()


def _as_metaimage(source: Path | bytes) -> bytes | None:
    """The bytes of a MetaImage or NRRD, None for other files."""
    if isinstance(source, bytes):
        return source if metaimage.recognises(source) else None
    if not source.name.lower().endswith(metaimage.SUFFIXES):
        return None
    return read_whole(source)


def _opened(source: Path | bytes) -> tuple[Any, Any]:
    """The package, and a volume whose voxels are not read yet."""
    try:
        package: Any = import_module("nibabel")
    except ImportError:
        raise UserError(f"NIfTI files need the package nibabel: {install('medical')}") from None
    if found := _as_metaimage(source):
        volume = metaimage.read(found)
        return package, package.Nifti1Image(volume.voxels, volume.affine, dtype=volume.voxels.dtype)
    if isinstance(source, Path):
        return package, package.load(source)
    plain = gzip.decompress(source) if source.startswith(COMPRESSED) else source
    kind = package.Nifti2Image if plain[4:8] == b"n+2\0" else package.Nifti1Image
    return package, kind.from_bytes(plain)


def stem(name: str) -> str:
    """A file's name without the ending of volumes."""
    suffix = next((suffix for suffix in reversed(SUFFIXES) if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)] if suffix else name
