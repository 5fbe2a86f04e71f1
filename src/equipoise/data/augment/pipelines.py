"""Augmentation pipelines by name: what a training image and an evaluation image go through, end to end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import torch
from torch import Generator, Tensor

from equipoise.core.errors import UserError
from equipoise.data.augment.augment_config import AugmentConfig
from equipoise.data.augment.colour import Brightness, ColourJitter, Greyscale
from equipoise.data.augment.draws import WHITE, Samples, Step, per_channel
from equipoise.data.augment.filters import BinomialBlur, GaussianBlur, GaussianNoise, MedianBlur, OneOf
from equipoise.data.augment.geometry import Flip, Mirror, Resize, ResizedCrop, ShiftScaleRotate, Shrink, Warp
from equipoise.data.augment.randaugment import RandAugment
from equipoise.data.feature_store import Features

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
Pipeline = tuple[tuple[tuple[Step, ...], ...], tuple[Step, ...]]
"""The steps of each training view, and those of evaluation."""

IMAGENET_COLOUR: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
IMAGENET_GREY: Statistics = ((0.456,), (0.224,))


@dataclass(frozen=True)
class Transform:
    """Steps, then normalisation: uint8 images (B, C, S, S) -> float32 (B, C, size, size)."""

    steps: tuple[Step, ...]
    statistics: Statistics

    @overload
    def __call__(self, images: Tensor, generator: Generator | None = ..., masks: None = ...) -> Tensor: ...
    @overload
    def __call__(self, images: Tensor, generator: Generator | None, masks: Tensor) -> tuple[Tensor, Tensor]: ...

    @torch.no_grad()
    def __call__(
        self, images: Tensor, generator: Generator | None = None, masks: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Images ready for a net, and, when masks (B, S, S) are given, the masks that went the same way.

        All random numbers come from the generator, which lives on the device of the images."""
        if images.shape[-1] != images.shape[-2]:
            raise UserError(f"images must be square to be augmented, these are {tuple(images.shape[-2:])}")
        batch = Samples(images.float(), masks)
        for step in self.steps:
            batch = step(batch, generator)
        normalised = self.normalise(batch.images)
        return normalised if batch.masks is None else (normalised, batch.masks)

    def normalise(self, images: Tensor) -> Tensor:
        """Grey levels from 0 to 255 as (levels / 255 - mean) / deviation, per channel."""
        mean, deviation = self.statistics
        scale = per_channel(tuple(1 / (WHITE * s) for s in deviation), images.device)
        shift = per_channel(tuple(-m / s for m, s in zip(mean, deviation)), images.device)
        return torch.addcmul(shift, images, scale)


@dataclass(frozen=True)
class Drawn:
    """Stored features (B, 1 + views, C, H, W) -> one of them for each image, float32 (B, C, H, W).

    Args:
        first, every, count: the stored views to draw from
    """

    first: int = 0
    every: int = 1
    count: int = 1

    def __call__(self, stored: Tensor, generator: Generator | None = None) -> Tensor:
        if self.count == 1:
            return stored[:, self.first].float()
        drawn = torch.randint(self.count, (len(stored),), generator=generator, device=stored.device)
        return stored[torch.arange(len(stored), device=stored.device), self.first + self.every * drawn].float()

    def normalise(self, features: Tensor) -> Tensor:
        """Features as they are."""
        return features


@dataclass(frozen=True)
class Augmentation:
    """The views of a training image, and the plain transform of evaluation, all onto `size` pixels."""

    views: tuple[Transform | Drawn, ...]
    plain: Transform | Drawn
    size: int
    channels: int = 3

    def view(self, index: int) -> Transform | Drawn:
        """View `index`; a pipeline with fewer views draws its last one again."""
        return self.views[min(index, len(self.views) - 1)]


def build_augmentation(config: AugmentConfig, size: int, channels: int) -> Augmentation:
    """The pipeline of a configuration for stored images of `size` pixels and 1 or 3 channels."""
    output = config.size or size
    views, plain = PIPELINES[config.name](output)
    statistics = choose_statistics(config, channels)
    return Augmentation(
        views=tuple(Transform(steps, statistics) for steps in views),
        plain=Transform(plain, statistics),
        size=output,
    )


def stored_augmentation(features: Features) -> Augmentation:
    """How features are read: plain ones unchanged, augmented ones drawn among the views of a pipeline."""
    each = [len(range(made, features.views, features.pipelines)) for made in range(features.pipelines)]
    drawn = tuple(Drawn(1 + made, features.pipelines, count) for made, count in enumerate(each) if count)
    channels, height, width = features.shape
    size = max(height, width)
    return Augmentation(views=drawn or (Drawn(),), plain=Drawn(), size=size, channels=channels)


def choose_statistics(config: AugmentConfig, channels: int) -> Statistics:
    """Mean and deviation per channel: those given, those named, or those of the pipeline's paper."""
    if (config.mean is None) != (config.std is None):
        raise UserError("augment.mean and augment.std go together: give both or neither")
    if config.mean is not None and config.std is not None:
        if len(config.mean) != channels or len(config.std) != channels or min(config.std) <= 0:
            raise UserError(
                f"augment.mean {config.mean} and augment.std {config.std} need one number for each of the "
                f"{channels} channels, and deviations above 0"
            )
        return config.mean, config.std
    named = config.normalise or ("half" if config.name == "prr" else "imagenet")
    if named == "imagenet":
        return IMAGENET_COLOUR if channels == len(IMAGENET_COLOUR[0]) else IMAGENET_GREY
    level = 0.5 if named == "half" else 0.0
    return (level,) * channels, (level or 1.0,) * channels


def _none(size: int) -> Pipeline:
    """Nothing but the size."""
    return ((Resize(size),),), (Resize(size),)


def _flips(size: int) -> Pipeline:
    """Flips left to right and top to bottom."""
    return ((Resize(size), Flip(Mirror(0.5, 0.5))),), (Resize(size),)


def _standard(size: int) -> Pipeline:
    """Mild changes that suit most medical images: crops, flips, small rotations, some light and colour."""
    maps = (ResizedCrop(area=(0.7, 1.0)), Mirror(0.5, 0.5), ShiftScaleRotate(degrees=15))
    jitter = ColourJitter(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.02)
    return ((Shrink(size), Warp(maps, size, padding="reflection"), jitter),), (Resize(size),)


def _fediic(size: int) -> Pipeline:
    """FedIIC (2023) on skin: view 1 with RandAugment, view 2 as in contrastive learning."""
    # Crops stay inside the image: at its border nothing is mixed with black.
    crop = (Shrink(size), Warp((ResizedCrop(area=(0.08, 1.0)), Mirror(0.5)), size, padding="border"))
    strong = (*crop, ColourJitter(0.4, 0.4, 0.4), RandAugment())
    contrastive = (*crop, ColourJitter(0.4, 0.4, 0.4, 0.1, probability=0.8), Greyscale(0.2))
    return (strong, contrastive), (Resize(round(size * 8 / 7), crop=size),)


def _fediic_ich(size: int) -> Pipeline:
    """FedIIC (2023) on CT of the head: small rotations and shifts, flips left to right, in both views."""
    maps = (ShiftScaleRotate(degrees=10, shift=0.02), Mirror(0.5))
    return ((Resize(size), Warp(maps, size)),), (Resize(size),)


def _fednpr(size: int) -> Pipeline:
    """FedNPR: flips, a Gaussian blur 5 pixels wide and 9 high, small rotations."""
    blur = GaussianBlur(kernel=(5, 9), sigma=(0.1, 5.0))
    maps = (Mirror(0.5, 0.5), ShiftScaleRotate(degrees=10))
    return ((blur, Resize(size), Warp(maps, size)),), (Resize(size),)


def _prr(size: int) -> Pipeline:
    """PRR-Imbalance: flips, brightness, blur or noise, then shift, scale and rotation onto black."""
    blur = tuple((kind(pixels), 0.7 / 6) for kind in (MedianBlur, BinomialBlur) for pixels in (3, 5))
    spoilt = OneOf((*blur, (GaussianNoise(variance=(5.0, 30.0)), 0.7 / 3)))
    maps = (Mirror(0.5, 0.5), ShiftScaleRotate(degrees=15, shift=0.1, scale=0.1, probability=0.85))
    steps = (Resize(size), Brightness(0.2, probability=0.75), spoilt, Warp(maps, size))
    return (steps,), (Resize(size),)


PIPELINES: dict[str, Callable[[int], Pipeline]] = {
    "none": _none,
    "flips": _flips,
    "standard": _standard,
    "fediic": _fediic,
    "fediic-ich": _fediic_ich,
    "fednpr": _fednpr,
    "fednpr-ich": _fednpr,
    "fedbm": _none,
    "prr": _prr,
}
