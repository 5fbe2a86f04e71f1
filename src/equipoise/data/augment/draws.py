"""What every step of an augmentation shares: the batch it works on, and random numbers one per sample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor

WHITE = 255.0


class Samples(NamedTuple):
    """Images (B, C, H, W) as float32 grey levels from 0 to 255, and masks (B, H, W) or None."""

    images: Tensor
    masks: Tensor | None

    def take(self, index: Tensor) -> "Samples":
        """The samples at the places of an index (n,)."""
        masks = None if self.masks is None else self.masks.index_select(0, index)
        return Samples(self.images.index_select(0, index), masks)

    def put(self, index: Tensor, samples: "Samples") -> "Samples":
        """A copy of this batch with samples written to the places of an index (n,)."""
        images = self.images.index_copy(0, index, samples.images)
        if self.masks is None or samples.masks is None:
            return Samples(images, self.masks)
        return Samples(images, self.masks.index_copy(0, index, samples.masks))


class Step(Protocol):
    """Changes a batch, drawing what it needs from the generator: one draw per sample, no host sync."""

    def __call__(self, batch: Samples, generator: Generator | None) -> Samples: ...


@dataclass(frozen=True)
class Photometric:
    """A step that changes grey levels and leaves every pixel, and so the masks, where they are."""

    def __call__(self, batch: Samples, generator: Generator | None) -> Samples:
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


def allot(images: Tensor, shares: Sequence[float], generator: Generator | None) -> list[tuple[Tensor, Tensor]]:
    """Deals a batch out at random: an image falls to each share with its probability, to one share at most.

    Images are shuffled and laid at equal distances, from a random start, along a line on which each share has
    its stretch. Every image has its chance, and the host knows each share's size up to one image at either end. So the
    cost grows with the chosen images only. Returns, per share, the indices of those
    that may belong to it (n,) and whether they do (n,).
    """
    count = len(images)
    order = torch.rand(count, generator=generator, device=images.device).argsort(stable=True)
    start = torch.rand((), generator=generator, device=images.device)
    places = (torch.arange(count, device=images.device) + start) / max(count, 1)
    dealt = []
    end = 0.0
    for share in shares:
        begin, end = end, end + share
        among = slice(math.floor(begin * count), math.ceil(end * count))
        dealt.append((order[among], (begin <= places[among]) & (places[among] < end)))
    return dealt


def per_image(values: Tensor) -> Tensor:
    """(B,) values shaped to act on images (B, C, H, W)."""
    return values[:, None, None, None]


@cache  # a captured step may read what is here
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The values as a float32 tensor on a device; kept, because copying them would wait for the device."""
    return torch.tensor(values, device=device)


def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One constant per channel, shaped to act on images (B, C, H, W)."""
    return constant(values, device)[:, None, None]
