"""Masks that a run's model predicts, of the size of the images that it is given, and the files that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from equipoise.core.errors import UserError
from equipoise.core.storage import replacing
from equipoise.data.pixels import picture
from equipoise.data.raw import decode_fully
from equipoise.engine.prediction import Predictor, files_in, pixels_of, probabilities_of

#: images at a time
BATCH = 32
#: red, green and blue of each class where a mask is looked at; more classes begin again
COLOURS = ((0, 0, 0), (230, 97, 1), (94, 60, 153), (26, 133, 255), (254, 254, 98), (64, 176, 166), (212, 17, 89))


def predicted_masks(predictor: Predictor, images: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """The name of each image with its mask, uint8 (H, W) of class indices, as large as the image.

    What lies outside the central square that the model sees (`data.crop = "centre"`) is background.

    Args:
        images: files, a folder of them, or arrays as `equipoise.data.pixels` reads them
    """
    if not predictor.task.dense:
        raise UserError(f"{predictor.config.run_name} classifies images and predicts no masks; leave --out out")
    if isinstance(images, str | Path):
        images = files_in(Path(images))
    for start in range(0, len(images), BATCH):
        some = images[start : start + BATCH]
        pixels, names = pixels_of(predictor, some)
        indices = probabilities_of(predictor, pixels).argmax(1).to(torch.uint8).numpy()
        for name, image, mask in zip(names, some, indices):
            yield (
                (name if isinstance(name, Path) else start + name),
                _restored(mask, _whole(image, predictor), predictor),
            )


def write_masks(predictor: Predictor, images: Sequence[Path], out: Path) -> list[Path]:
    """Write a mask for each image: PNG files in a folder, or all in one .npz file; gives the paths written.

    A PNG holds class indices, with a palette to look at them. Masks have the names of their images.
    """
    if out.exists():
        raise UserError(f"{out} exists already; name another file or folder")
    targets = dict(zip(images, _places(images)))
    if out.suffix == ".npz":
        masks: dict[str, Any] = {
            str(targets[name].with_suffix("")): mask for name, mask in predicted_masks(predictor, images)
        }
        with replacing(out) as draft, draft.open("wb") as file:
            np.savez_compressed(file, classes=np.array(predictor.classes), **masks)
        return [out]
    if out.suffix:
        raise UserError(f"{out}: masks are written to a folder of PNG files, or to one file that ends in .npz")
    for name, mask in predicted_masks(predictor, images):
        target = out / targets[name]
        target.parent.mkdir(parents=True, exist_ok=True)
        painted = Image.fromarray(mask)
        painted.putpalette([level for colour in _palette(len(predictor.classes)) for level in colour])
        painted.save(target)
    return [out / target for target in targets.values()]


def _places(images: Sequence[Path]) -> list[Path]:
    """Where the mask of each image goes: under its own name, in its folder below the one that all images share."""
    parents = [image.resolve().parent for image in images]
    shared = next(
        folder for folder in (parents[0], *parents[0].parents) if all(p.is_relative_to(folder) for p in parents)
    )
    places = [parent.relative_to(shared) / f"{image.stem}.png" for image, parent in zip(images, parents)]
    if len(set(places)) < len(places):
        places = [place.with_name(f"{image.name}.png") for place, image in zip(places, images)]
    return places


def _palette(classes: int) -> list[tuple[int, int, int]]:
    return [COLOURS[0], *(COLOURS[1 + place % (len(COLOURS) - 1)] for place in range(classes - 1))]


def _whole(image: Any, predictor: Predictor) -> tuple[int, int]:
    """Width and height of an image as it came."""
    if isinstance(image, str | Path):
        return decode_fully(Path(image).read_bytes(), 8, window=predictor.config.data.window).whole
    return picture(image).size


def _restored(mask: np.ndarray, whole: tuple[int, int], predictor: Predictor) -> np.ndarray:
    """A mask (size, size) as large as its image, nearest neighbours; where the model saw nothing, background."""
    width, height = whole
    if predictor.config.data.crop == "squash":
        return np.asarray(Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST))
    side = min(whole)
    left, top = (width - side) // 2, (height - side) // 2
    found = np.zeros((height, width), dtype=np.uint8)
    square = Image.fromarray(mask).resize((side, side), Image.Resampling.NEAREST)
    found[top : top + side, left : left + side] = np.asarray(square)
    return found
