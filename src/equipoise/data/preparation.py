"""What `data prepare` does to an image, and `predict` to the images that a model is shown later: the same."""

import torch

from equipoise.data.augment import even_brightness, shades_of_grey
from equipoise.data.data_config import DataConfig

PREPARATION = ("crop", "window", "brightness", "colour_constancy")
"""The data's settings that say how an image becomes pixels of a store."""


def relight(images: torch.Tensor, config: DataConfig) -> torch.Tensor:
    """Images (B, C, H, W), uint8, in the light that `config` asks for."""
    if config.brightness:
        images = even_brightness(images)
    return shades_of_grey(images, power=6) if config.colour_constancy else images
