"""What every step of an augmentation shares: the batch it works on, and random numbers one per sample."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor

WHITE = 255.0


class Batch(NamedTuple):
    """Images (B, C, H, W) as float32 grey levels from 0 to 255, and masks (B, H, W) or None."""

    images: Tensor
    masks: Tensor | None


class Step(Protocol):
    """Changes a batch, drawing what it needs from the generator: one draw per sample, no host sync."""

    def __call__(self, batch: Batch, generator: Generator | None) -> Batch: ...


@dataclass(frozen=True)
class Photometric:
    """A step that changes grey levels and leaves every pixel, and so the masks, where they are."""

    def __call__(self, batch: Batch, generator: Generator | None) -> Batch:
        return batch._replace(images=self.change(batch.images, generator))

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        """Changed images, of the same shape (B, C, H, W)."""
        raise NotImplementedError


def uniform(images: Tensor, low: float, high: float, generator: Generator | None) -> Tensor:
    """One number from [low, high) per image, (B,)."""
    return torch.rand(len(images), generator=generator, device=images.device) * (high - low) + low


def coin(images: Tensor, probability: float, generator: Generator | None) -> Tensor:
    """True with the given probability, one per image, (B,)."""
    return torch.rand(len(images), generator=generator, device=images.device) < probability


def per_image(values: Tensor) -> Tensor:
    """(B,) values shaped to act on images (B, C, H, W)."""
    return values[:, None, None, None]


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The values as a float32 tensor on a device; kept, because copying them would wait for the device."""
    return torch.tensor(values, device=device)


def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One constant per channel, shaped to act on images (B, C, H, W)."""
    return constant(values, device)[:, None, None]
