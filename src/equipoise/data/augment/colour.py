"""Steps and functions that change light and colour; images (B, C, H, W) are grey levels from 0 to 255."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from equipoise.data.augment.draws import WHITE, Photometric, coin, per_image, uniform

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, the weights of a grey version of a colour image


def grey(images: Tensor) -> Tensor:
    """The luma (B, 1, H, W) of colour images; images of one channel are their own."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def blend(reference: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """`reference` at factor 0, `images` at 1, and further in that direction beyond; factor (B,)."""
    return torch.lerp(reference, images, per_image(factor)).clamp_(0, WHITE)


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Images times a factor (B,)."""
    return (images * per_image(factor)).clamp_(0, WHITE)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blends each image with its mean luma; factor (B,)."""
    return blend(grey(images.mean(dim=(2, 3), keepdim=True)), images, factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blends each image with its luma; factor (B,)."""
    return images if images.shape[1] == 1 else blend(grey(images), images, factor)


def adjust_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Turns the hue of each image by a share of the colour circle (B,), in hue, saturation and value."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    value = images.amax(dim=1, keepdim=True)
    chroma = value - images.amin(dim=1, keepdim=True)
    # Hue in sixths of the circle, times chroma: the brightest channel, and how far to its neighbours.
    scaled = torch.where(
        red == value,
        green - blue,
        torch.where(green == value, blue - red + 2.0 * chroma, red - green + 4.0 * chroma),
    )
    hue = scaled / chroma.clamp(min=1e-6) + 6.0 * per_image(turn)
    return torch.cat([value - chroma * _dimming(hue + shift) for shift in (5.0, 3.0, 1.0)], dim=1)


def _dimming(sixths: Tensor) -> Tensor:
    """How far a channel is below the brightest, as a share of the chroma, round the colour circle."""
    position = sixths.remainder(6.0)
    return torch.minimum(position, 4.0 - position).clamp_(0, 1)


@dataclass(frozen=True)
class Brightness(Photometric):
    """Adds the same amount, up to `limit` of the white level either way, to all pixels of an image."""

    limit: float
    probability: float = 1.0

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        chosen = coin(images, self.probability, generator)
        shift = uniform(images, -self.limit * WHITE, self.limit * WHITE, generator) * chosen
        return (images + per_image(shift)).clamp_(0, WHITE)


@dataclass(frozen=True)
class ColourJitter(Photometric):
    """Brightness, contrast and saturation by factors from [1 - x, 1 + x], and hue by a turn from [-x, x].

    Applied in this order to every image: a random order per image would cost all orders."""

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    probability: float = 1.0

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        chosen = coin(images, self.probability, generator)
        for strength, adjust, rest in (
            (self.brightness, adjust_brightness, 1.0),
            (self.contrast, adjust_contrast, 1.0),
            (self.saturation, adjust_saturation, 1.0),
            (self.hue, adjust_hue, 0.0),
        ):
            if strength > 0:
                amount = rest + uniform(images, -strength, strength, generator) * chosen
                images = adjust(images, amount)
        return images


@dataclass(frozen=True)
class Greyscale(Photometric):
    """Takes the colour out of an image, with a probability."""

    probability: float

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        chosen = coin(images, self.probability, generator)
        return adjust_saturation(images, 1.0 - chosen.float())


def shades_of_grey(images: Tensor, power: float = 6.0) -> Tensor:
    """Colour constancy (Finlayson and Trezzi, 2004): images under a light that looks grey; uint8 in and out.

    The light of an image (B, C, H, W) is the Minkowski mean, of the given power, of each channel."""
    levels = images.double()
    light = (levels / WHITE).pow(power).mean(dim=(2, 3), keepdim=True).pow(1 / power).clamp(min=1e-6)
    grey_light = light.square().mean(dim=1, keepdim=True).sqrt()
    return (levels * (grey_light / light)).round().clamp(0, WHITE).to(torch.uint8)


def even_brightness(images: Tensor, level: float = WHITE / 2) -> Tensor:
    """Images (B, C, H, W) whose mean luma is `level`, by one factor for all pixels of an image; uint8 in and out.

    Hue changes only where a pixel would exceed white. A black image stays black."""
    levels = images.double()
    mean = grey(levels).mean(dim=(1, 2, 3), keepdim=True).clamp(min=1e-6)
    return (levels * (level / mean)).round().clamp(0, WHITE).to(torch.uint8)
