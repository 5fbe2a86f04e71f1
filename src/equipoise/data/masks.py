"""Masks: images whose pixels name structures, as class indices of a packed store.

How a mask's values name structures:

- Values below the number of classes are the classes themselves, counted from 0, the background.
- With two classes, 255 is the second one too: masks of 0 and 255, and masks of 0 and 1, mean the same.
- Every other value is an error. JPEG files blur values, so they cannot hold masks.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np
from PIL import Image, ImageOps

from equipoise.core.errors import first_few
from equipoise.data import volumes
from equipoise.data.dicom import is_dicom, stored_values
from equipoise.data.raw import Crop, Frame, central_square

#: the classes of masks unless `data.classes` names others
USUAL_CLASSES = ("background", "foreground")
WHITE = 255


def decode_mask(
    content: bytes,
    size: int,
    crop: Crop,
    whole: tuple[int, int],
    classes: Sequence[str],
    frame: Frame | None = None,
    threshold: int | None = None,
) -> np.ndarray:
    """A mask's file as class indices, uint8 (size, size), cut and resized (nearest neighbour) as its image is.

    Args:
        whole: width and height of the image, before it becomes square
        frame: which image of a file with several
        threshold: values from this one on are the second of two classes, the others the first

    Raises:
        ValueError: for a mask of another size than its image, and for values that are no class
        Exception: of many kinds, as Pillow does, when the file is broken
    """
    values = _values(content, frame)
    if threshold is not None:
        values = values >= threshold
    return square_mask(as_classes(values, classes), size, crop, whole)


def square_mask(indices: np.ndarray, size: int, crop: Crop, whole: tuple[int, int]) -> np.ndarray:
    """Class indices, uint8 (H, W), as a square (size, size) of the same part of the image."""
    if indices.shape[::-1] != tuple(whole):
        width, height = indices.shape[::-1]
        raise ValueError(f"the mask has {width}x{height} pixels, but its image {whole[0]}x{whole[1]}")
    picture = Image.fromarray(indices)
    if crop == "centre":
        picture = central_square(picture)
    return np.asarray(picture.resize((size, size), Image.Resampling.NEAREST))


def as_classes(values: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """The class index of each value of a mask, uint8 (H, W), by the rule above.

    >>> as_classes(np.array([[0, 255]]), ("skin", "lesion")).tolist()
    [[0, 1]]
    >>> as_classes(np.array([[0, 2]]), ("background", "zone", "rim")).tolist()
    [[0, 2]]
    """
    found = np.unique(values)
    if not (found == np.round(found)).all():
        raise ValueError("the mask has values that are no whole numbers")
    if len(classes) == 2 and set(found.tolist()) <= {0, WHITE}:
        return (values == WHITE).astype(np.uint8)
    if found[0] < 0 or found[-1] >= len(classes):
        shown = first_few((f"{value:g}" for value in found), 6)
        rule = "0 and 255, or 0 and 1" if len(classes) == 2 else f"0 to {len(classes) - 1}"
        raise ValueError(
            f"the mask has the values {shown}, but masks of {len(classes)} classes ({', '.join(classes)}) have {rule}; "
            "name all structures in data.classes, the background first, and keep masks out of JPEG files"
        )
    return values.astype(np.uint8)


def _values(content: bytes, frame: Frame | None) -> np.ndarray:
    """The values of a mask's pixels as its file holds them (H, W)."""
    if volumes.is_volume_content(content):
        if frame is None:
            raise ValueError("it is a volume, and one slice of it is to be read")
        found = volumes.values(content, frame.plane, frame.number)
        return found[:, ::-1] if frame.mirrored else found
    if is_dicom(content):
        return stored_values(content, None if frame is None else frame.number)
    if content.startswith(np.lib.format.MAGIC_PREFIX):
        found = np.load(io.BytesIO(content), allow_pickle=False)
        return found if found.ndim == 2 else found.squeeze()
    with Image.open(io.BytesIO(content)) as opened:
        values = np.asarray(ImageOps.exif_transpose(opened))
    return _one_channel(values)


def _one_channel(values: np.ndarray) -> np.ndarray:
    """Grey values (H, W) of a picture, which may hold them three times, and opacity beside."""
    if values.ndim == 2:
        return values
    colours = values[..., :3] if values.shape[-1] in (3, 4) else values[..., :1]
    if (colours != colours[..., :1]).any():
        raise ValueError("the mask has colours; save it with one grey level for each structure")
    return colours[..., 0]


def stem(name: str) -> str:
    """The name of an image's or a mask's file without its ending."""
    return volumes.stem(name) if volumes.is_volume(name) else PurePath(name).stem


def image_of(name: str) -> str:
    """The stem of the image that a mask is named after; its own stem, where its name does not say that it is one."""
    return volumes.MASK.sub("", stem(name))
