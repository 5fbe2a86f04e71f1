"""NIfTI volumes as 8-bit slices. nibabel is imported when a file is read.

A volume is turned so that its axes run to the right, to the front and to the head, and then cut into slices.
"""

import gzip
import io
import re
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from equipoise.core.errors import UserError, install

Plane = Literal["sagittal", "coronal", "axial"]
PLANES = get_args(Plane)  # by the axis that they cut
SUFFIXES = (".nii", ".nii.gz")
#: what the names of masks end in, after the name of their volume
MASK = re.compile(r"[_-](mask|seg|segmentation|labels?|gt)$", re.IGNORECASE)
#: shares of a volume's voxels that are darker than black and not darker than white
DARKEST, BRIGHTEST = 0.005, 0.995
COMPRESSED = b"\x1f\x8b"


def is_nifti(content: bytes) -> bool:
    """Whether a file, compressed or not, says that it is NIfTI: by its mark behind the header."""
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
    stem = _stem(file.name)
    volume = MASK.sub("", stem)
    return volume != stem and any((file.parent / f"{volume}{suffix}").is_file() for suffix in SUFFIXES)


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
    package, image = _opened(content)
    if image.ndim != 3:
        raise ValueError(f"an image of {image.ndim} dimensions; split it into volumes of 3")
    voxels = np.asarray(package.as_closest_canonical(image).dataobj, dtype=np.float32)
    if not np.isfinite(voxels).all():
        raise ValueError("it has voxels that are not finite numbers")
    if window:
        low, high = window[0] - window[1] / 2, window[0] + window[1] / 2
    else:
        low, high = np.quantile(voxels, (DARKEST, BRIGHTEST))
        if low == high:
            low, high = voxels.min(), voxels.max()
    return np.round(np.clip((voxels - low) / max(high - low, 1e-12), 0, 1) * 255).astype(np.uint8)


def _opened(source: Path | bytes) -> tuple[Any, Any]:
    """The package, and a volume whose voxels are not read yet."""
    try:
        package: Any = import_module("nibabel")
    except ImportError:
        raise UserError(f"NIfTI files need the package nibabel: {install('medical')}") from None
    if isinstance(source, Path):
        return package, package.load(source)
    plain = gzip.decompress(source) if source.startswith(COMPRESSED) else source
    kind = package.Nifti2Image if plain[4:8] == b"n+2\0" else package.Nifti1Image
    return package, kind.from_bytes(plain)


def _stem(name: str) -> str:
    suffix = next((suffix for suffix in reversed(SUFFIXES) if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)] if suffix else name
