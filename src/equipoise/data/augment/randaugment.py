"""RandAugment (Cubuk et al., 2020), in the form in which FedIIC (2023) uses it, for a whole batch at once.

Each image draws its own operations. They come in three families, each one computation for all its images. Operations
that move pixels are one sampling with a matrix per image. Operations on single levels are one look-up in a table per
image and channel. The rest blend an image with a version of itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from equipoise.data.augment.colour import blend, grey
from equipoise.data.augment.draws import WHITE, Samples, allot, coin, per_channel, per_image
from equipoise.data.augment.geometry import matrices, sample, sample_masks, sampling_grid

LEVELS = 256
MAX_MAGNITUDE = 10.0
MAX_DEGREES, MAX_SHEAR, MAX_SHIFT = 30.0, 0.3, 0.45
MEAN_COLOUR = (124.0, 116.0, 104.0)  # of ImageNet; fills what an image leaves empty when it moves


class Operation(IntEnum):
    """What may happen to an image, family by family."""

    ROTATE = 0
    SHEAR_X = auto()
    SHEAR_Y = auto()
    TRANSLATE_X = auto()
    TRANSLATE_Y = auto()
    AUTO_CONTRAST = auto()
    EQUALISE = auto()
    INVERT = auto()
    POSTERISE = auto()
    SOLARISE = auto()
    SOLARISE_ADD = auto()
    CONTRAST = auto()
    BRIGHTNESS = auto()
    COLOUR = auto()
    SHARPNESS = auto()


NOTHING = len(Operation)


@dataclass(frozen=True)
class Draw:
    """What happens to each of n images, (n,): an operation or NOTHING, a strength from 0 to 1, and a sign."""

    choice: Tensor
    strength: Tensor
    sign: Tensor


@dataclass(frozen=True)
class RandAugment:
    """`layers` operations one after the other, each drawn from all fifteen and applied with a probability.

    The magnitude, from 0 to 10, is drawn around `magnitude` with deviation `spread` and clipped."""

    layers: int = 2
    magnitude: float = 10.0
    spread: float = 0.5
    probability: float = 0.5

    def __call__(self, batch: Samples, generator: Generator | None) -> Samples:
        shares = [self.probability * len(family.operations) / len(Operation) for family in FAMILIES]
        for _ in range(self.layers):
            for family, (index, chosen) in zip(FAMILIES, allot(batch.images, shares, generator)):
                if len(index):
                    draw = self.draw(family.operations, chosen, generator)
                    batch = batch.put(index, family.apply(batch.take(index), draw))
        return batch

    def draw(self, operations: range, chosen: Tensor, generator: Generator | None) -> Draw:
        """One of the operations for each image that is chosen (n,), and NOTHING for the others."""
        count, device = len(chosen), chosen.device
        choice = torch.randint(operations.start, operations.stop, (count,), generator=generator, device=device)
        noise = torch.randn(count, generator=generator, device=device)
        strength = (self.magnitude + self.spread * noise).clamp_(0, MAX_MAGNITUDE) / MAX_MAGNITUDE
        sign = 1.0 - 2.0 * coin(chosen, 0.5, generator).float()
        return Draw(torch.where(chosen, choice, NOTHING), strength, sign)


def move(batch: Samples, draw: Draw) -> Samples:
    """Rotates, shears (about the upper left corner) or shifts."""
    images, masks = batch

    def how_much(operation: Operation, most: float) -> Tensor:
        return (draw.strength * draw.sign * (draw.choice == operation)).double() * most

    angle = how_much(Operation.ROTATE, math.radians(MAX_DEGREES))
    shear_x, shear_y = how_much(Operation.SHEAR_X, MAX_SHEAR), how_much(Operation.SHEAR_Y, MAX_SHEAR)
    # The image is 2 wide in the coordinates of maps.
    shift_x = how_much(Operation.TRANSLATE_X, 2 * MAX_SHIFT)
    shift_y = how_much(Operation.TRANSLATE_Y, 2 * MAX_SHIFT)
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
    return Samples(moved, None if masks is None else sample_masks(masks, grid, "zeros"))


def retone(batch: Samples, draw: Draw) -> Samples:
    """Maps every level of every channel, rounded, through the table of the operation chosen."""
    images = batch.images
    pixels = images.round().long().flatten(2)
    levels = torch.arange(LEVELS, device=images.device, dtype=torch.float32).expand(*pixels.shape[:2], LEVELS)
    shade = grey(images.mean(dim=(2, 3), keepdim=True)).round().flatten(2)
    strength = draw.strength[:, None, None]
    factor = enhancement(strength)
    keep = torch.exp2(8 - (4 * strength).floor())  # posterise keeps at most 4 bits
    tables = {
        Operation.AUTO_CONTRAST: stretched(levels, pixels),
        Operation.EQUALISE: equalised(levels, pixels),
        Operation.INVERT: WHITE - levels,
        Operation.POSTERISE: (levels / keep).floor() * keep,
        Operation.SOLARISE: torch.where(levels < (LEVELS * strength).floor(), levels, WHITE - levels),
        Operation.SOLARISE_ADD: torch.where(levels < LEVELS / 2, levels + (110 * strength).floor(), levels),
        Operation.CONTRAST: shade + factor * (levels - shade),
        Operation.BRIGHTNESS: factor * levels,
    }
    table = levels
    for operation, changed in tables.items():
        table = torch.where((draw.choice == operation)[:, None, None], changed, table)
    toned = table.clamp(0, WHITE).gather(2, pixels)
    return batch._replace(images=toned.view(images.shape))


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


def enhance(batch: Samples, draw: Draw) -> Samples:
    """Blends with grey (colour), or with a smoothed image whose outermost pixels stay (sharpness)."""
    images = batch.images
    smooth = images.clone()
    # The kernel 1-1-1, 1-5-1, 1-1-1 over 13 is 9/13 of a mean and 4/13 of the pixel itself.
    smooth[..., 1:-1, 1:-1].lerp_(F.avg_pool2d(images, 3, stride=1), 9 / 13)
    reference = torch.where(per_image(draw.choice == Operation.COLOUR), grey(images), smooth)
    factor = torch.where(draw.choice == NOTHING, 1.0, enhancement(draw.strength))
    return batch._replace(images=blend(reference, images, factor))


def enhancement(strength: Tensor) -> Tensor:
    """The factor of a blend: 0.1 (almost the reference) to 1.9 (as far beyond the image)."""
    return 1.8 * strength + 0.1


@dataclass(frozen=True)
class Family:
    """Operations that are computed together; `apply` changes images that drew NOTHING by rounding only."""

    operations: range
    apply: Callable[[Samples, Draw], Samples]


FAMILIES = (
    Family(range(Operation.ROTATE, Operation.AUTO_CONTRAST), move),
    Family(range(Operation.AUTO_CONTRAST, Operation.COLOUR), retone),
    Family(range(Operation.COLOUR, NOTHING), enhance),
)
