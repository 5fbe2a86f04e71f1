"""Steps that move pixels, and masks with them: flips, resizing, and maps composed into a single sampling.

A map is a 3x3 matrix per image that takes a point of the output to the point of the input it shows, both in
coordinates from -1 to 1 between the outer edges of a square image. Maps that follow each other multiply, so
that a pipeline interpolates once.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from equipoise.data.augment.draws import Samples, coin, per_image, uniform

Padding = Literal["zeros", "border", "reflection"]


class Map(Protocol):
    """Draws one matrix per image, (B, 3, 3) in float64."""

    def __call__(self, images: Tensor, generator: Generator | None) -> Tensor: ...


def matrices(rows: tuple[tuple[Tensor | float, ...], ...], like: Tensor) -> Tensor:
    """(B, 3, 3) float64 from the upper two rows, whose entries are (B,) tensors or plain numbers.

    In float64 because products in float32 may be rounded to TF32 on a GPU, a tenth of a pixel."""
    flat = torch.zeros(len(like), 9, dtype=torch.float64, device=like.device)
    flat[:, 8] = 1.0
    for place, entry in enumerate(entry for row in rows for entry in row):
        flat[:, place] = entry
    return flat.view(-1, 3, 3)


@dataclass(frozen=True)
class Mirror:
    """Flips left to right, top to bottom, or both, each with its own probability."""

    horizontal: float = 0.5
    vertical: float = 0.0

    def __call__(self, images: Tensor, generator: Generator | None) -> Tensor:
        across, down = (1.0 - 2.0 * flip.double() for flip in self.draw(images, generator))
        return matrices(((across, 0.0, 0.0), (0.0, down, 0.0)), images)

    def draw(self, images: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Which images (B,) are flipped left to right, and which top to bottom."""
        return coin(images, self.horizontal, generator), coin(images, self.vertical, generator)


@dataclass(frozen=True)
class ShiftScaleRotate:
    """Rotates and scales about the centre, then shifts, all three with one probability.

    `degrees` is the greatest angle, `shift` the greatest move as a share of the width, and the image grows by
    a factor from [1 - scale, 1 + scale]."""

    degrees: float = 0.0
    shift: float = 0.0
    scale: float = 0.0
    probability: float = 1.0

    def __call__(self, images: Tensor, generator: Generator | None) -> Tensor:
        chosen = coin(images, self.probability, generator).double()
        limit = math.radians(self.degrees)
        angle = uniform(images, -limit, limit, generator).double() * chosen
        growth = 1.0 + uniform(images, -self.scale, self.scale, generator).double() * chosen
        # A share of the width is twice as much in coordinates that run from -1 to 1.
        across, down = (2.0 * uniform(images, -self.shift, self.shift, generator).double() * chosen for _ in range(2))
        return similarity(angle, growth, across, down, images)


def similarity(angle: Tensor, growth: Tensor, across: Tensor, down: Tensor, like: Tensor) -> Tensor:
    """The map of an image turned by `angle` (radians, counter-clockwise as seen), grown by `growth` and then
    moved by (across, down); all (B,)."""
    cosine, sine = angle.cos() / growth, angle.sin() / growth
    return matrices(
        (
            (cosine, -sine, sine * down - cosine * across),
            (sine, cosine, -sine * across - cosine * down),
        ),
        like,
    )


@dataclass(frozen=True)
class ResizedCrop:
    """A random window, its area and (log-uniform) aspect ratio from the given ranges, fills the output.

    As usual, ten windows are tried and the first that fits is taken; if none does, the whole image is."""

    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    attempts: int = 10

    def __call__(self, images: Tensor, generator: Generator | None) -> Tensor:
        draws = torch.rand(len(images), self.attempts, 2, generator=generator, device=images.device).double()
        area = self.area[0] + (self.area[1] - self.area[0]) * draws[..., 0]
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        ratio = torch.exp(low + (high - low) * draws[..., 1])
        width, height = torch.sqrt(area * ratio), torch.sqrt(area / ratio)
        fits = (width <= 1) & (height <= 1)
        first = fits.int().argmax(dim=1, keepdim=True)
        found = fits.any(dim=1)
        width = torch.where(found, width.gather(1, first)[:, 0], 1.0)
        height = torch.where(found, height.gather(1, first)[:, 0], 1.0)
        across = uniform(images, -1, 1, generator).double() * (1 - width)
        down = uniform(images, -1, 1, generator).double() * (1 - height)
        return matrices(((width, 0.0, across), (0.0, height, down)), images)


@dataclass(frozen=True)
class Warp:
    """Applies maps, first to last, in one bilinear sampling onto `size` x `size` pixels; masks go to the
    nearest pixel."""

    maps: tuple[Map, ...]
    size: int
    padding: Padding = "zeros"

    def __call__(self, batch: Samples, generator: Generator | None) -> Samples:
        drawn = [draw(batch.images, generator) for draw in self.maps]
        grid = sampling_grid(compose(drawn), self.size, batch.images.shape[-1])
        images = sample(batch.images, grid, self.padding)
        masks = None if batch.masks is None else sample_masks(batch.masks, grid, self.padding)
        return Samples(images, masks)


def compose(drawn: list[Tensor]) -> Tensor:
    """The map (B, 3, 3) of an image that goes through all of them, first to last."""
    total = drawn[0]
    for following in drawn[1:]:
        total = total @ following
    return total


def sampling_grid(maps: Tensor, size: int, source_size: int) -> Tensor:
    """Where each output pixel looks, (B, size, size, 2), in coordinates from -1 to 1 between the centres of
    the outer pixels of the source: only so does `reflection` not repeat the outermost pixel."""
    centres = (torch.arange(size, device=maps.device) * 2 + 1) / size - 1
    maps = (maps * (source_size / max(source_size - 1, 1))).float()
    along_rows = maps[:, :2, 0, None, None] * centres
    along_columns = maps[:, :2, 1, None, None] * centres[:, None] + maps[:, :2, 2, None, None]
    return (along_rows + along_columns).permute(0, 2, 3, 1)


def sample(images: Tensor, grid: Tensor, padding: Padding) -> Tensor:
    """Bilinear values (B, C, h, w) of images at the points of a grid (B, h, w, 2)."""
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=padding, align_corners=True)


def sample_masks(masks: Tensor, grid: Tensor, padding: Padding) -> Tensor:
    """Labels (B, h, w) of masks (B, H, W) at the nearest points of a grid."""
    moved = F.grid_sample(masks[:, None].float(), grid, mode="nearest", padding_mode=padding, align_corners=True)
    return moved[:, 0].to(masks.dtype)


@dataclass(frozen=True)
class Flip:
    """Flips images without interpolation; use `Mirror` inside a `Warp` where there is one."""

    mirror: Mirror

    def __call__(self, batch: Samples, generator: Generator | None) -> Samples:
        images, masks = batch
        for axis, flip in zip((-1, -2), self.mirror.draw(images, generator)):
            images = torch.where(per_image(flip), images.flip(axis), images)
            if masks is not None:
                masks = torch.where(flip[:, None, None], masks.flip(axis), masks)
        return Samples(images, masks)


@dataclass(frozen=True)
class Shrink:
    """Before a random crop: brings images much larger than the output down, so that sampling does not alias.

    The remaining image is 8/7 of the output size (256 for 224 pixels)."""

    size: int

    def __call__(self, batch: Samples, generator: Generator | None) -> Samples:
        largest = round(self.size * 8 / 7)
        return Resize(largest)(batch, generator) if batch.images.shape[-1] > largest else batch


@dataclass(frozen=True)
class Resize:
    """Resizes to `size` pixels (bilinear with antialiasing), then keeps the central `crop` pixels."""

    size: int
    crop: int | None = None

    def __call__(self, batch: Samples, generator: Generator | None) -> Samples:
        images, masks = batch
        if images.shape[-1] != self.size:
            shape = (self.size, self.size)
            images = F.interpolate(images, shape, mode="bilinear", antialias=True, align_corners=False)
            if masks is not None:
                resized = F.interpolate(masks[:, None].float(), shape, mode="nearest-exact")
                masks = resized[:, 0].to(masks.dtype)
        if self.crop is not None:
            start = round((self.size - self.crop) / 2)
            window = (..., slice(start, start + self.crop), slice(start, start + self.crop))
            images, masks = images[window], None if masks is None else masks[window]
        return Samples(images, masks)
