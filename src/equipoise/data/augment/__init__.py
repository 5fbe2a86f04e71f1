"""Augmentation in batches, on the device of the images, random per sample."""

from typing import TYPE_CHECKING

from equipoise.core.lazy import on_demand

if TYPE_CHECKING:
    from equipoise.data.augment.augment_config import AugmentConfig
    from equipoise.data.augment.colour import even_brightness, shades_of_grey
    from equipoise.data.augment.pipelines import Augmentation, Transform, build_augmentation, stored_augmentation

__all__ = [
    "AugmentConfig",
    "Augmentation",
    "Transform",
    "build_augmentation",
    "even_brightness",
    "shades_of_grey",
    "stored_augmentation",
]

__getattr__ = on_demand(__name__, __all__, "augment_config", "colour", "pipelines")
