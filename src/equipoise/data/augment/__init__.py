"""Augmentation in batches, on the device of the images, random per sample."""

from equipoise.data.augment.colour import even_brightness, shades_of_grey
from equipoise.data.augment.pipelines import Augmentation, AugmentConfig, Transform, build_augmentation

__all__ = ["AugmentConfig", "Augmentation", "Transform", "build_augmentation", "even_brightness", "shades_of_grey"]
