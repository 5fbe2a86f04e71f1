"""Images that a program holds in memory, as a store and a net take them: squares of 8-bit RGB.

How an image is read:

- uint8 and other whole numbers are grey levels from 0 to 255; floats are levels from 0 to 1.
- An axis of 1 (grey) or 3 (colour) entries holds the channels, first (C, H, W) or last (H, W, C). Where both could,
  a torch tensor has them first and a numpy array last. `layout` names the other order.
- Images of two axes (H, W) are grey.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from equipoise.core.errors import UserError
from equipoise.data.data_config import DataConfig
from equipoise.data.preparation import relight
from equipoise.data.raw import to_rgb, to_square

Layout = Literal["channels_first", "channels_last"]
Images = Sequence[Any] | np.ndarray | torch.Tensor
"""An array of images, or a list of arrays, tensors or Pillow images, which may differ in size."""

COLOURS = (1, 3)
BATCH = 128
"""images that are made square at a time"""
RAW = "give raw pixels: whole numbers from 0 to 255, or floats from 0 to 1 (Equipoise normalises images itself)"


def squares(images: Images, size: int | None, config: DataConfig, layout: Layout | None = None) -> Iterator[np.ndarray]:
    """Batches of images as uint8 (b, 3, size, size), prepared as files are.

    Args:
        size: pixels per side; by default the shorter side of the images, which must then be alike
    """
    images = whole(images)
    size = size or own_size(images, layout)
    for start in range(0, len(images), BATCH):
        batch = [
            to_square(picture(image, layout, f"image {start + index}"), size, config.crop)
            for index, image in enumerate(images[start : start + BATCH])
        ]
        pixels = np.stack(batch)
        yield relight(torch.from_numpy(pixels), config).numpy()


def whole(images: Images) -> Images:
    """Images as they came, once it is clear that they are several and that their values can be grey levels."""
    if isinstance(images, torch.Tensor):
        images = images.detach().cpu()
    if isinstance(images, np.ndarray | torch.Tensor):
        if images.ndim not in (3, 4):
            raise UserError(
                f"images have {images.ndim} axes {tuple(images.shape)}; give (images, height, width), with an axis of "
                "1 or 3 channels after the first or at the end"
            )
        if len(images):
            _check_levels(np.asarray(images), "images")
    return images


def own_size(images: Images, layout: Layout | None = None) -> int:
    """The shorter side of images that are all alike."""
    if isinstance(images, np.ndarray | torch.Tensor):
        return min(picture(images[0], layout, "image 0").size)
    sides = {picture(image, layout, f"image {index}").size for index, image in enumerate(images)}
    if len(sides) > 1:
        raise UserError(
            f"images have {len(sides)} different sizes, such as {' and '.join(map(str, sorted(sides)[:2]))}; say how "
            "many pixels each side shall have, with size=128, say"
        )
    return min(sides.pop())


def picture(image: Any, layout: Layout | None = None, name: str = "the image") -> Image.Image:
    """One image (Pillow's, an array or a tensor) as an RGB picture."""
    if isinstance(image, Image.Image):
        return to_rgb(image)
    first = isinstance(image, torch.Tensor) if layout is None else layout == "channels_first"
    pixels = np.asarray(image.detach().cpu() if isinstance(image, torch.Tensor) else image)
    if pixels.ndim == 3:
        pixels = _channels_last(pixels, first, layout is not None, name)
    elif pixels.ndim != 2:
        raise UserError(f"{name} has the shape {pixels.shape}; give (height, width), with 1 or 3 channels")
    if 0 in pixels.shape:
        raise UserError(f"{name} has the shape {pixels.shape} and no pixel; leave it out")
    _check_levels(pixels, name)
    levels = np.round(pixels * 255.0) if pixels.dtype.kind == "f" else pixels
    levels = levels.astype(np.uint8)
    grey = levels.ndim == 2 or levels.shape[-1] == 1
    return Image.fromarray(levels.reshape(levels.shape[:2]) if grey else np.ascontiguousarray(levels)).convert("RGB")


def _channels_last(pixels: np.ndarray, first: bool, told: bool, name: str) -> np.ndarray:
    """Pixels (H, W, C) of an image of three axes."""
    could = {True: pixels.shape[0] in COLOURS, False: pixels.shape[2] in COLOURS}
    if not could[first] and not told:
        first = not first
    if not could[first]:
        where = f"its {'first' if first else 'last'} axis" if told else "neither its first nor its last axis"
        holds = "has not 1 or 3" if told else "has 1 or 3"
        raise UserError(
            f"{name} has the shape {pixels.shape}: {where} {holds} entries, so its channels are unknown; give grey or "
            "RGB images (without transparency), with channels first or last"
        )
    return pixels.transpose(1, 2, 0) if first else pixels


def _check_levels(pixels: np.ndarray, name: str) -> None:
    """Refuse values that are no grey levels."""
    if pixels.dtype.kind not in "uif":
        raise UserError(f"{name}: pixels of the type {pixels.dtype} are no grey levels; {RAW}")
    if pixels.dtype == np.uint8 or not pixels.size:
        return
    low, high = pixels.min(), pixels.max()
    if not np.isfinite(low) or not np.isfinite(high):
        raise UserError(f"{name}: some pixels are NaN or infinite, so they are no grey levels; {RAW}")
    most = 1 if pixels.dtype.kind == "f" else 255
    if low < 0 or high > most:
        kind = "floats" if most == 1 else "whole numbers"
        raise UserError(f"{name}: pixels are {kind} from {low:g} to {high:g}, not 0 to {most}; {RAW}")
