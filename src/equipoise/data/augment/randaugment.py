"""RandAugment (Cubuk et al., 2020), in the form in which FedIIC (2023) uses it, for a whole batch at once.

Each image draws its own operations. All those that move pixels are one sampling with a matrix per image; all
those that depend on a pixel's level alone are one look-up in a table per image and channel.
"""

import math
from dataclasses import dataclass
from enum import IntEnum, auto

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from equipoise.data.augment.colour import blend, grey
from equipoise.data.augment.draws import WHITE, Batch, coin, per_channel, per_image
from equipoise.data.augment.geometry import matrices, sample, sample_masks, sampling_grid

LEVELS = 256
MEAN_COLOUR = (124.0, 116.0, 104.0)  # of ImageNet; shows where an image was moved away
MAX_DEGREES, MAX_SHEAR, MAX_SHIFT = 30.0, 0.3, 0.45
MAX_LEVEL = 10.0


class Operation(IntEnum):
    """What may happen to an image."""

    AUTO_CONTRAST = 0
    EQUALISE = auto()
    INVERT = auto()
    ROTATE = auto()
    POSTERISE = auto()
    SOLARISE = auto()
    SOLARISE_ADD = auto()
    COLOUR = auto()
    CONTRAST = auto()
    BRIGHTNESS = auto()
    SHARPNESS = auto()
    SHEAR_X = auto()
    SHEAR_Y = auto()
    TRANSLATE_X = auto()
    TRANSLATE_Y = auto()


NOTHING = len(Operation)


@dataclass(frozen=True)
class RandAugment:
    """`layers` operations one after the other, each drawn from all fifteen and applied with a probability.

    The magnitude, from 0 to 10, is drawn around `magnitude` with deviation `spread` and clipped."""

    layers: int = 2
    magnitude: float = 10.0
    spread: float = 0.5
    probability: float = 0.5

    def __call__(self, batch: Batch, generator: Generator | None) -> Batch:
        for _ in range(self.layers):
            batch = apply(batch, *self.draw(batch.images, generator))
        return batch

    def draw(self, images: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Per image, (B,): an operation or NOTHING, a strength from 0 to 1, and a sign."""
        count = len(images)
        choice = torch.randint(NOTHING, (count,), generator=generator, device=images.device)
        choice = torch.where(coin(images, self.probability, generator), choice, NOTHING)
        noise = torch.randn(count, generator=generator, device=images.device)
        strength = (self.magnitude + self.spread * noise).clamp_(0, MAX_LEVEL) / MAX_LEVEL
        sign = 1.0 - 2.0 * coin(images, 0.5, generator).float()
        return choice, strength, sign


def apply(batch: Batch, choice: Tensor, strength: Tensor, sign: Tensor) -> Batch:
    """One operation on each image: its choice, strength and sign, all (B,)."""
    images, masks = move(batch, choice, strength * sign)
    images = retone(images, choice, strength)
    return Batch(enhance(images, choice, strength), masks)


def move(batch: Batch, choice: Tensor, amount: Tensor) -> Batch:
    """Rotates, shears (about the upper left corner) or shifts; an amount (B,) of 1 or -1 is the most."""
    images, masks = batch

    def how_much(operation: Operation, most: float) -> Tensor:
        return (amount * (choice == operation)).double() * most

    angle = how_much(Operation.ROTATE, math.radians(MAX_DEGREES))
    shear_x, shear_y = how_much(Operation.SHEAR_X, MAX_SHEAR), how_much(Operation.SHEAR_Y, MAX_SHEAR)
    # The image is 2 wide in the coordinates of maps.
    shift_x, shift_y = (
        how_much(Operation.TRANSLATE_X, 2 * MAX_SHIFT),
        how_much(Operation.TRANSLATE_Y, 2 * MAX_SHIFT),
    )
    maps = matrices(
        (
            (angle.cos(), shear_x - angle.sin(), shear_x + shift_x),
            (shear_y + angle.sin(), angle.cos(), shear_y + shift_y),
        ),
        images,
    )
    grid = sampling_grid(maps, images.shape[-1], images.shape[-1])
    fill = per_channel(MEAN_COLOUR, images.device)[None]
    fill = grey(fill) if images.shape[1] == 1 else fill
    moved = sample(images - fill, grid, "zeros").add_(fill)
    return Batch(moved, None if masks is None else sample_masks(masks, grid, "zeros"))


def retone(images: Tensor, choice: Tensor, strength: Tensor) -> Tensor:
    """Maps every level of every channel through the table of the operation chosen, after rounding."""
    count, channels, height, width = images.shape
    pixels = images.round().long().view(count, channels, -1)
    levels = torch.arange(LEVELS, device=images.device, dtype=torch.float32).expand(count, channels, LEVELS)
    shade = grey(images.mean(dim=(2, 3), keepdim=True)).round().view(count, 1, 1)
    strength = strength[:, None, None]
    factor = enhancement(strength)
    keep = torch.exp2(8 - (4 * strength).floor())  # posterise keeps at most 4 bits
    tables = {
        Operation.AUTO_CONTRAST: stretched(levels, pixels),
        Operation.EQUALISE: equalised(levels, pixels),
        Operation.INVERT: WHITE - levels,
        Operation.POSTERISE: (levels / keep).floor() * keep,
        Operation.SOLARISE: torch.where(levels < (LEVELS * strength).floor(), levels, WHITE - levels),
        Operation.SOLARISE_ADD: torch.where(levels < 128, levels + (110 * strength).floor(), levels),
        Operation.CONTRAST: shade + factor * (levels - shade),
        Operation.BRIGHTNESS: factor * levels,
    }
    table = levels
    for operation, changed in tables.items():
        table = torch.where((choice == operation)[:, None, None], changed, table)
    return table.clamp(0, WHITE).gather(2, pixels).view(count, channels, height, width)


def stretched(levels: Tensor, pixels: Tensor) -> Tensor:
    """Tables (B, C, 256) that spread each channel over all levels; constant channels stay."""
    low, high = pixels.aminmax(dim=2, keepdim=True)
    span = (high - low).float()
    return torch.where(span > 0, ((levels - low) * (WHITE / span.clamp(min=1))).floor(), levels)


def equalised(levels: Tensor, pixels: Tensor) -> Tensor:
    """Tables (B, C, 256) that make all levels of a channel equally common, as far as counts allow."""
    counts = pixels.new_zeros(levels.shape).scatter_add_(2, pixels, torch.ones_like(pixels))
    brightest = counts.gather(2, pixels.amax(dim=2, keepdim=True))
    step = (pixels.shape[2] - brightest) // (LEVELS - 1)
    below = counts.cumsum(dim=2) - counts
    table = (step // 2 + below) // step.clamp(min=1)
    return torch.where(step > 0, table.float(), levels)


def enhance(images: Tensor, choice: Tensor, strength: Tensor) -> Tensor:
    """Colour blends with grey, sharpness with a smoothed image, whose outermost pixels are as they were."""
    colour, sharpness = choice == Operation.COLOUR, choice == Operation.SHARPNESS
    smooth = images.clone()
    # The kernel 1-1-1, 1-5-1, 1-1-1 over 13 is 9/13 of a mean and 4/13 of the pixel itself.
    smooth[..., 1:-1, 1:-1].lerp_(F.avg_pool2d(images, 3, stride=1), 9 / 13)
    reference = torch.where(per_image(colour), grey(images), smooth)
    return blend(reference, images, torch.where(colour | sharpness, enhancement(strength), 1.0))


def enhancement(strength: Tensor) -> Tensor:
    """The factor of a blend: 0.1 (almost the reference) to 1.9 (as far beyond the image)."""
    return 1.8 * strength + 0.1
