"""How the server merges what sites send, one named tensor at a time: weighted means (McMahan et al., 2017),
PRR's Fourier aggregation (Chen et al., 2022), inverse-distance weights (Yeganeh et al., 2020), and robust merging
(Yin et al., 2018; Blanchard et al., 2017)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise.core.arguments import check_choice, check_shape
from equipoise.core.errors import UserError
from equipoise.losses import widened

Item = TypeVar("Item")
#: axes of the weights of sites, by what `fourier_average` makes of them
DIMENSIONS = {"conv": 5, "linear": 3, "classifier": 2}
#: values of all sites whose Fourier transforms are held at a time; each takes some 20 bytes
MOST_TRANSFORMED = 1 << 24


def weighted_mean(tensors: Tensor | Iterable[Tensor], weights: Tensor | Sequence[float]) -> Tensor:
    """Mean of one tensor per site, by weights that need not sum to 1 (sample counts, say).

    `tensors` is (K, ...) or anything that yields K tensors: they are folded in order, one multiply-add each. So lazy
    replies never lie in memory together, and they give the same bits. Sites of weight 0 are skipped,
    so one site, or one-hot weights, give that site's tensor bit for bit. Half precision is summed in float32;
    integers are averaged in float64 and rounded.
    """
    used = _weighed(tensors, weights)
    first, share = next(used)
    mean = _averageable(first) * share
    for tensor, share in used:
        check_shape("a site's tensor", tensor.shape, first.shape)
        mean.add_(_averageable(tensor), alpha=share)
    return _as_before(mean, first.dtype)


def weighted_mean_by_name(
    sites: Iterable[Mapping[str, Tensor]], weights: Tensor | Sequence[float]
) -> dict[str, Tensor]:
    """`weighted_mean` of every named tensor, with the same bits: reads one site's tensors after the other's.

    All tensors of a site are folded in together, which on a GPU takes a few kernels in place of one for each.
    """
    used = _weighed(sites, weights)
    first, share = next(used)
    names = list(first)
    dtypes = {name: first[name].dtype for name in names}
    groups = [[name for name in names if dtypes[name] == dtype] for dtype in dict.fromkeys(dtypes.values())]

    def numbers(site: Mapping[str, Tensor], group: Sequence[str]) -> list[Tensor]:
        return [_averageable(site[name]) for name in group]

    means = [torch._foreach_mul(numbers(first, group), share) for group in groups]
    for site, share in used:
        for mean, group in zip(means, groups):
            tensors = numbers(site, group)
            for name, own, so_far in zip(group, tensors, mean):
                check_shape(f"a site's '{name}'", own.shape, so_far.shape)
            torch._foreach_add_(mean, tensors, alpha=share)
    found = {name: tensor for group, mean in zip(groups, means) for name, tensor in zip(group, mean)}
    return {name: _as_before(found[name], dtypes[name]) for name in names}


def _weighed(items: Iterable[Item], weights: Tensor | Sequence[float]) -> Iterator[tuple[Item, float]]:
    """The items of sites with a weight above 0, one after the other, each with its share of all weights."""
    shares = _shares(weights)
    count = 0
    for count, item in enumerate(items, 1):
        if count <= len(shares) and shares[count - 1] > 0:
            yield item, shares[count - 1]
    if count != len(shares):
        raise UserError(f"there are {len(shares)} weights for {count} sites")


def _shares(weights: Tensor | Sequence[float]) -> list[float]:
    """The weights over their sum, in float64."""
    values = torch.as_tensor(weights, dtype=torch.float64)
    check_shape("weights", values.shape, [values.numel()])
    if not (values.isfinite().all() and values.sum() > 0 and values.min() >= 0):
        raise UserError(f"weights of sites must be non-negative with a positive sum, not {values.tolist()}")
    return (values / values.sum()).tolist()


def _averageable(tensor: Tensor) -> Tensor:
    """The tensor itself, or its numbers in float32 where they have half precision, in float64 where integers."""
    return widened(tensor) if tensor.is_floating_point() else tensor.double()


def _as_before(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """A mean in the type of what was averaged: integers are rounded."""
    return (mean if dtype.is_floating_point else mean.round_()).to(dtype)


def inverse_distance_weights(models: Tensor | Iterable[Tensor], reference: Tensor, order: float = 1.0) -> Tensor:
    """IDA's aggregation weights (K,), float64: proportional to 1 / |model - reference|, and summing to 1.

    `models` is (K, ...) or K tensors shaped like `reference`, usually their mean; `order` is the norm's.
    Models at equal distances, also at none, weigh the same.
    """
    target = reference.double()
    distances = torch.stack([torch.linalg.vector_norm(model.double() - target, order) for model in models])
    inverse = 1 / distances.clamp(min=torch.finfo(torch.float64).eps)
    return inverse / inverse.sum()


def coordinate_median(tensors: Tensor) -> Tensor:
    """Median (...) of each number over K sites, tensors (K, ...); of an even number of sites, the mean of the middle
    two. Integers are rounded."""
    ordered = _averageable(tensors).sort(0).values
    middle = torch.lerp(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], 0.5)
    return _as_before(middle, tensors.dtype)


def trimmed_mean(tensors: Tensor, share: float) -> Tensor:
    """Mean (...) of each number over K sites, tensors (K, ...), without the largest and the smallest floor(share * K).

    A share of 0 is the plain mean. Integers are rounded.
    """
    if not 0 <= share < 0.5:
        raise UserError(f"share={share}: the share of sites cut off at each end lies between 0 and 1/2")
    cut = share_of_sites(share, len(tensors))
    ordered = _averageable(tensors).sort(0).values
    return _as_before(ordered[cut : len(ordered) - cut].mean(0), tensors.dtype)


def krum_scores(distances: Tensor, liars: int) -> Tensor:
    """Krum's score (K,) of each site: its summed squared distance to the K - liars - 2 sites nearest to it.

    `distances` (K, K) are squared. The lowest score is the most trustworthy. At least one neighbour counts.
    """
    check_shape("distances", distances.shape, [len(distances), len(distances)])
    neighbours = max(len(distances) - liars - 2, 1)
    nearest = distances.sort(1).values[:, 1 : 1 + neighbours]  # the first is the site itself
    return nearest.sum(1)


def share_of_sites(share: float, sites: int) -> int:
    """How many of some sites a share is, rounded down: 0.29 of 100 are 29, though 28.999... in binary fractions."""
    return math.floor(share * sites + 1e-9)


def band_schedule(round: int, rounds: int, start: float = 0.7, end: float = 0.95) -> float:
    """The share of frequencies that sites share in a round (from 0): from `start`, linearly towards `end`."""
    return start + round / rounds * (end - start)


def fourier_average(
    tensors: Tensor, band: float, kind: str = "conv", phase: str = "angle", parts: str = "both"
) -> Tensor:
    """PRR's progressive Fourier aggregation: sites share low frequencies and keep their own high ones.

    Tensors (K, ...) of K sites; the result has the same shape, one tensor per site. `kind` says how a weight
    becomes a signal: "conv" (out, in, h, w) as an image of (in * h, w * out), "linear" (out, in) unchanged,
    "classifier" (out, in) row by row. Layers of one shape may go together, (K, L, ...). The band of an axis of
    n frequencies, 0 in the middle, is the half-open [n//2 - b, n//2 + b), b = floor(n * band / 2), as released:
    band 1 spares the last frequency of an odd axis.

    In the band, "angle" averages amplitudes and wrapped phase angles (as released); "complex" averages the
    complex numbers, which has no trouble with angles near pi. `parts` "amplitude" or "phase" shares one and
    keeps the other. An empty band shares nothing, bit for bit; a full band (even axes) with "complex" is the plain
    mean.
    """
    check_choice("phase", phase, ("angle", "complex"))
    check_choice("parts", parts, ("both", "amplitude", "phase"))
    if not 0 <= band <= 1:
        raise UserError(f"band={band}: the share of frequencies that sites share lies between 0 and 1")
    signals = _as_signals(tensors[:1], kind)  # of one site: how those of all look
    axes = (-1,) if kind == "classifier" else (-2, -1)
    if not all(_half_width(signals.shape[axis], band) for axis in axes):
        return tensors.clone()
    portions = tensors.split(max(MOST_TRANSFORMED // max(signals.numel(), 1), 1))
    # Several portions are transformed twice, some sites at a time.
    whole = _spectra(_as_signals(tensors, kind), axes) if len(portions) == 1 else None

    def spectra() -> Iterator[Tensor]:
        several = (_spectra(_as_signals(portion, kind), axes) for portion in portions)
        return several if whole is None else iter([whole])

    mean = _mean_spectrum(spectra(), len(tensors), phase)
    taken = _shares_taken(signals, band, axes)
    sizes = [signals.shape[axis] for axis in axes]
    shared = mean * taken
    merged = torch.empty_like(tensors, memory_format=torch.contiguous_format)
    for own, target in zip(spectra(), merged.split(len(portions[0]))):
        if parts != "both":
            amplitude, angle = (own.abs(), mean.angle()) if parts == "phase" else (mean.abs(), own.angle())
            shared = torch.polar(amplitude, angle.expand_as(own)).mul_(taken)
        mixed = own.mul_(1 - taken).add_(shared)
        target.copy_(_as_weights(torch.fft.irfftn(mixed, s=sizes, dim=axes), target, kind))
    return merged


def _spectra(signals: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Half spectra, complex: the other half mirrors it, for the signals are real."""
    size = signals.shape[-1]
    return _real_where_real(torch.fft.rfftn(widened(signals), dim=axes), axes, size)


def _mean_spectrum(spectra: Iterable[Tensor], sites: int, phase: str) -> Tensor:
    """The mean over all sites: of amplitudes and angles apart, or of the complex numbers."""
    total: Tensor | None = None
    for own in spectra:
        portion = own.sum(0) if phase == "complex" else torch.stack([own.abs().sum(0), own.angle().sum(0)])
        total = portion if total is None else total.add_(portion)
    assert total is not None
    mean = total.div_(sites)
    return mean if phase == "complex" else torch.polar(mean[0], mean[1])


def _as_signals(tensors: Tensor, kind: str) -> Tensor:
    """Weights (K, ...) as the signals (K, columns, rows) that are transformed.

    A convolution's image lies transposed, so that its values are read nearly in the order in which they lie.
    """
    check_choice("kind", kind, DIMENSIONS)
    if tensors.dim() < DIMENSIONS[kind] or not len(tensors):
        raise UserError(f"tensors of shape {tuple(tensors.shape)} are no weights of kind {kind!r}, one for each site")
    if kind != "conv":
        return tensors
    return tensors.movedim(-1, -4).flatten(-4, -3).flatten(-2)


def _as_weights(signals: Tensor, tensors: Tensor, kind: str) -> Tensor:
    """The inverse of `_as_signals`, for weights shaped like `tensors`."""
    if kind != "conv":
        return signals
    *layers, outputs, inputs, height, width = tensors.shape
    return signals.reshape(*layers, width, outputs, inputs, height).movedim(-4, -1)


def _half_width(size: int, band: float) -> int:
    """How many of an axis's frequencies lie in the band on either side of its middle."""
    return math.floor(size * band / 2)


def _shares_taken(signals: Tensor, band: float, axes: tuple[int, ...]) -> Tensor:
    """How much of each frequency of a half spectrum is the shared one: 1 in the band, 0 outside, broadcastable.

    It is a half where a frequency is in the band and its mirror is not, as at the band's open end. The real part of
    the whole inverse transform, which is the weight, takes the mean of a frequency and its mirror.
    """
    inside, mirrored = signals.new_ones(()), signals.new_ones(())
    for axis in axes:
        size = signals.shape[axis]
        centre, half = size // 2, _half_width(size, band)
        own = signals.new_zeros(size)
        own[centre - half : centre + half] = 1
        own = torch.fft.ifftshift(own)
        shape = [-1 if other == axis else 1 for other in axes]
        kept = size // 2 + 1 if axis == axes[-1] else size
        inside = inside * own[:kept].reshape(shape)
        mirrored = mirrored * own.flip(0).roll(1)[:kept].reshape(shape)
    return widened((inside + mirrored) / 2)


def _real_where_real(spectra: Tensor, axes: tuple[int, ...], size: int) -> Tensor:
    """Half spectra of real signals, `size` values in the last axis, without rounding errors in real frequencies.

    The frequencies that mirror themselves are real; an imaginary part of -1e-17 in place of 0 would turn an angle of
    pi into -pi.
    """
    sizes = [*(spectra.shape[axis] for axis in axes[:-1]), size]
    mirrors: list[Any] = [slice(0, 1) if size % 2 else slice(0, size, size // 2) for size in sizes]
    spectra[..., *mirrors].imag.zero_()
    return spectra
