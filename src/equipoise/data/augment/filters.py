"""Steps that mix each pixel with its neighbours or with noise: Gaussian, binomial and median blur, noise."""

from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from equipoise.data.augment.draws import WHITE, Photometric, coin, constant, per_image, uniform


def convolve(images: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """Each image (B, C, H, W) under its own separable kernel, weights (B, width) and (B, height).

    Edges reflect. Written as sums of shifted images: exact in float32 on any device, and as fast as a grouped
    convolution with one group per image."""
    for weights, axis in ((across, 3), (down, 2)):
        taps = weights.shape[1]
        margin = taps // 2
        edges = (margin, margin, 0, 0) if axis == 3 else (0, 0, margin, margin)
        padded = F.pad(images, edges, mode="reflect")
        total = padded.narrow(axis, 0, images.shape[axis]) * per_image(weights[:, 0])
        for tap in range(1, taps):
            shifted = padded.narrow(axis, tap, images.shape[axis])
            total.addcmul_(shifted, per_image(weights[:, tap]))
        images = total
    return images


def gaussian_weights(sigma: Tensor, taps: int) -> Tensor:
    """Normalised weights (B, taps) of a Gaussian with deviation sigma (B,) in pixels."""
    offsets = torch.arange(taps, device=sigma.device) - taps // 2
    return torch.softmax(-0.5 * (offsets / sigma[:, None]) ** 2, dim=1)


@dataclass(frozen=True)
class GaussianBlur(Photometric):
    """A Gaussian of random width under a kernel of fixed size (width, height), odd numbers of pixels."""

    kernel: tuple[int, int]
    sigma: tuple[float, float]

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        sigma = uniform(images, *self.sigma, generator)
        width, height = self.kernel
        return convolve(images, gaussian_weights(sigma, width), gaussian_weights(sigma, height))


@dataclass(frozen=True)
class BinomialBlur(Photometric):
    """Weights 1-2-1 or 1-4-6-4-1 at random: what OpenCV takes for a Gaussian of 3 or 5 pixels."""

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        narrow = constant((0.0, 4.0, 8.0, 4.0, 0.0), images.device)
        wide = constant((1.0, 4.0, 6.0, 4.0, 1.0), images.device)
        weights = torch.where(coin(images, 0.5, generator)[:, None], wide, narrow) / 16
        return convolve(images, weights, weights)


@dataclass(frozen=True)
class MedianBlur(Photometric):
    """The median of 3x3 or of 5x5 pixels, one or the other at random."""

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        levels = images.round().to(torch.uint8)  # a quarter of the traffic, and medians are selections anyway
        wide = per_image(coin(images, 0.5, generator))
        return torch.where(wide, median_filter(levels, 5), median_filter(levels, 3)).float()


def median_filter(images: Tensor, size: int) -> Tensor:
    """The exact median of size x size pixels around each pixel, size odd; edges repeat.

    A selection network of element-wise minima and maxima. Columns are sorted once and shared by all windows;
    when rows are sorted too, an entry has all those above and to its left below it, and all others of its
    lower right above it, which leaves few candidates for the middle."""
    height, width = images.shape[-2:]
    padded = _repeat_edges(images, size // 2)
    columns = _sort([padded.narrow(-2, row, height) for row in range(size)])
    rows = [_sort([column.narrow(-1, place, width) for place in range(size)]) for column in columns]
    middle = size * size // 2 + 1
    candidates = [
        rows[i][j]
        for i, j in product(range(size), repeat=2)
        if (i + 1) * (j + 1) <= middle and (size - i) * (size - j) <= middle
    ]
    while len(candidates) > 1:
        # The smallest and the largest of more than half of the values cannot be their median.
        enough = len(candidates) // 2 + 2
        candidates = _without_extremes(candidates[:enough]) + candidates[enough:]
    return candidates[0]


def _repeat_edges(images: Tensor, margin: int) -> Tensor:
    """Images with their outermost rows and columns repeated (`F.pad` does so for floats only)."""
    height, width = images.shape[-2:]
    rows = torch.arange(-margin, height + margin, device=images.device).clamp_(0, height - 1)
    columns = torch.arange(-margin, width + margin, device=images.device).clamp_(0, width - 1)
    return images.index_select(-2, rows).index_select(-1, columns)


def _exchange(values: list[Tensor], low: int, high: int) -> None:
    """Puts the smaller of two values, element by element, at `low` and the larger at `high`."""
    smaller, larger = torch.minimum(values[low], values[high]), torch.maximum(values[low], values[high])
    values[low], values[high] = smaller, larger


def _sort(values: list[Tensor]) -> list[Tensor]:
    """The values in ascending order, element by element (bubble sort: short lists only)."""
    values = list(values)
    for end in range(len(values) - 1, 0, -1):
        for place in range(end):
            _exchange(values, place, place + 1)
    return values


def _without_extremes(values: list[Tensor]) -> list[Tensor]:
    """All values but the smallest and the largest, element by element, in no order."""
    values = list(values)
    last = len(values) - 1
    for place in range(len(values) // 2):
        _exchange(values, place, last - place)
    for place in range(1, (last + 2) // 2):
        _exchange(values, 0, place)
    for place in range((last + 1) // 2, last):
        _exchange(values, place, last)
    return values[1:-1]


@dataclass(frozen=True)
class GaussianNoise(Photometric):
    """Independent noise in every pixel and channel, its variance (in squared grey levels) drawn per image."""

    variance: tuple[float, float]

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        deviation = uniform(images, *self.variance, generator).sqrt_()
        noise = torch.empty_like(images).normal_(generator=generator)
        return torch.addcmul(images, noise, per_image(deviation)).clamp_(0, WHITE)


@dataclass(frozen=True)
class OneOf(Photometric):
    """With a probability, one of several steps, all equally likely. All are computed, then one is chosen."""

    steps: tuple[Photometric, ...]
    probability: float

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        count = len(self.steps)
        choice = torch.randint(count, (len(images),), generator=generator, device=images.device)
        choice = torch.where(coin(images, self.probability, generator), choice, count)
        changed = images
        for index, step in enumerate(self.steps):
            changed = torch.where(per_image(choice == index), step.change(images, generator), changed)
        return changed
