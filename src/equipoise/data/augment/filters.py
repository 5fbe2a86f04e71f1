"""Steps that mix each pixel with its neighbours or with noise: Gaussian, binomial and median blur, noise."""

import math
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from equipoise.data.augment.draws import WHITE, Photometric, allot, constant, per_image, uniform


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
    """Weights 1-2-1 for 3 pixels or 1-4-6-4-1 for 5: what OpenCV takes for a Gaussian of that size."""

    size: int

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        row = [math.comb(self.size - 1, place) for place in range(self.size)]
        weights = constant(tuple(entry / sum(row) for entry in row), images.device).expand(len(images), -1)
        return convolve(images, weights, weights)


@dataclass(frozen=True)
class MedianBlur(Photometric):
    """The median of size x size pixels."""

    size: int

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        # A quarter of the memory traffic, and a median is one of the levels anyway.
        return median_filter(images.round().to(torch.uint8), self.size).float()


def median_filter(images: Tensor, size: int) -> Tensor:
    """The exact median of size x size pixels around each pixel of (B, C, H, W), size odd; edges repeat.

    A selection network of element-wise minima and maxima. Columns are sorted once and shared by all windows;
    when rows are sorted too, an entry is at least all those above and to its left, and at most all those
    below and to its right, which leaves few candidates for the middle."""
    height, width = images.shape[-2:]
    padded = _repeat_edges(images, size // 2)
    # A shift by a row or a column is a shift in memory: what is read across an edge lands in the margin.
    flat, stride = padded.flatten(), padded.shape[-1]
    columns = _sort(_shifts(flat, stride, size))
    rows = [_sort(_shifts(column, 1, size)) for column in columns]
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
    flat[: len(candidates[0])] = candidates[0]
    return flat.view(padded.shape)[..., :height, :width]


def _shifts(flat: Tensor, step: int, count: int) -> list[Tensor]:
    """`flat` from its start, from `step` further on, and so on, all cut to the length of the last."""
    length = len(flat) - (count - 1) * step
    return [flat.narrow(0, index * step, length) for index in range(count)]


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
    """At most one of several steps, each with its own probability; costs no more than the images it changes."""

    steps: tuple[tuple[Photometric, float], ...]

    def change(self, images: Tensor, generator: Generator | None) -> Tensor:
        changed = images.clone()
        shares = [probability for _, probability in self.steps]
        for (step, _), (index, chosen) in zip(self.steps, allot(images, shares, generator)):
            if len(index):
                some = changed.index_select(0, index)
                some = torch.where(per_image(chosen), step.change(some, generator), some)
                changed.index_copy_(0, index, some)
        return changed
