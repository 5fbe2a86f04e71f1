"""Weighted means, inverse-distance weights and Fourier aggregation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import assert_close
from equipoise import aggregation
from equipoise.aggregation import (
    band_schedule,
    fourier_average,
    inverse_distance_weights,
    weighted_mean,
    weighted_mean_by_name,
)
from equipoise.core.errors import UserError

SHAPES = {"conv": (6, 4, 3, 2), "linear": (5, 8), "classifier": (3, 16)}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_weighted_mean_has_the_golden_values(golden):
    case = golden("fediic/fedavg")
    assert_close(weighted_mean(case["w"], case["sizes"]), case["w_out"])
    assert_close(weighted_mean(case["b"], case["sizes"].tolist()), case["b_out"])


def test_weights_are_renormalised_over_the_sites_that_take_part(golden):
    case = golden("fedbm/fedavg_selected")
    assert_close(weighted_mean(case["w"], case["size_weights"]), case["out"])
    assert_close(weighted_mean(case["w"], case["normalised"]), case["out"])


def test_the_shared_part_of_personal_models_has_the_golden_mean(golden):
    case = golden("fednpr/aggregate_personal_head")
    mean = weighted_mean([case["client_a"], case["client_b"]], case["weights"])
    assert_close(mean, case["global_out"])
    shared = int(case["n_shared"])
    assert_close(torch.cat([mean[:shared], case["client_a"][shared:]]), case["client_a_after_copy"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_one_site_or_one_hot_weights_give_that_sites_bits(dtype):
    tensors = normal(3, 2, 5, dtype=torch.float64).to(dtype)
    tensors[1, 0, 0] = -0.0
    tensors[0] = torch.nan
    mean = weighted_mean(tensors, [0, 17, 0])
    assert torch.equal(mean, tensors[1]) and mean[0, 0].signbit()
    assert torch.equal(weighted_mean(tensors[1:2], [0.3]), tensors[1])


def test_lazy_tensors_give_the_same_bits_as_stacked_ones():
    tensors, weights = normal(7, 33, 5, dtype=torch.float32), [3, 1, 4, 1, 5, 9, 2]
    lazy = weighted_mean((tensor.clone() for tensor in tensors), weights)
    assert torch.equal(lazy, weighted_mean(tensors, weights))
    by_hand = tensors[0] * (3 / 25)
    for tensor, weight in zip(tensors[1:], weights[1:]):
        by_hand.add_(tensor, alpha=weight / 25)
    assert torch.equal(lazy, by_hand)


def test_named_tensors_have_the_mean_of_each_and_keep_their_order_and_types():
    sites = [
        {
            "a": normal(3, 2, seed=seed, dtype=torch.float32),
            "steps": torch.tensor(7 * seed),
            "b": normal(4, seed=seed + 10),
        }
        for seed in range(3)
    ]
    weights = [5, 0, 3]
    sites[1]["a"][0] = torch.nan  # a site of weight 0 is not read
    mean = weighted_mean_by_name(iter(sites), weights)
    assert list(mean) == ["a", "steps", "b"]
    for name, value in mean.items():
        alone = weighted_mean([site[name] for site in sites], weights)
        assert value.dtype == alone.dtype and torch.equal(value, alone)


def test_averaging_does_not_touch_what_the_sites_sent():
    tensors = normal(3, 4)
    before = tensors.clone()
    weighted_mean(list(tensors), [1, 2, 3])
    assert torch.equal(tensors, before)


def test_integers_are_averaged_and_rounded():
    batches = torch.tensor([10, 20, 21])
    mean = weighted_mean(batches, [1, 1, 2])
    assert mean.dtype == torch.int64 and mean == 18


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.integers(0, 100))
def test_the_mean_is_the_convex_combination_whatever_the_order_and_scale(weights, seed):
    tensors, values = normal(len(weights), 4, seed=seed), torch.tensor(weights)
    expected = (values[:, None] * tensors).sum(0) / values.sum()
    assert_close(weighted_mean(tensors, weights), expected, 1e-9)
    assert_close(weighted_mean(tensors.flip(0), [7 * weight for weight in weights[::-1]]), expected, 1e-9)


def test_half_precision_is_summed_in_single_precision():
    tensors = normal(2000, 3, dtype=torch.float32).half() + 1
    mean, (named,) = (
        weighted_mean(tensors, [1] * 2000),
        weighted_mean_by_name([{"w": t} for t in tensors], [1] * 2000).values(),
    )
    assert mean.dtype == torch.float16 and torch.equal(mean, named)
    assert_close(mean.double(), tensors.double().mean(0), 1e-3)


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [2, -1], [1, float("nan")], [1, float("inf")]])
def test_weights_that_make_no_mean_are_refused(weights):
    with pytest.raises(UserError, match="weights of sites"):
        weighted_mean(normal(2, 3), weights)


@pytest.mark.parametrize("sites", [1, 3])
def test_a_weight_too_few_or_too_many_is_refused(sites):
    with pytest.raises(UserError, match=f"2 weights for {sites} sites"):
        weighted_mean(normal(sites, 2), [1, 1])


def test_tensors_of_other_shapes_are_refused():
    with pytest.raises(UserError, match=r"\(1,\), expected \(3,\)"):
        weighted_mean([normal(3), normal(1)], [1, 1])
    with pytest.raises(UserError, match="weights has the shape"):
        weighted_mean(normal(2, 3), [[1], [1]])


@pytest.mark.parametrize(("shape", "kind"), [((3, 5), "linear"), ((3, 4, 5), "conv"), ((0, 4, 5), "linear")])
def test_tensors_that_are_no_weights_of_their_kind_are_refused(shape, kind):
    with pytest.raises(UserError, match=f"no weights of kind '{kind}'"):
        fourier_average(normal(*shape), 0.9, kind)


def test_inverse_distance_weights_are_inverse_to_the_distance():
    reference = torch.zeros(4)
    models = [reference + gap for gap in (1.0, 2.0, -4.0)]
    assert_close(inverse_distance_weights(models, reference), torch.tensor([4.0, 2.0, 1.0]) / 7, 1e-7)


def test_inverse_distance_weights_of_equal_models_are_equal():
    reference = normal(5)
    assert_close(inverse_distance_weights(reference.expand(3, 5), reference), torch.full((3,), 1 / 3), 1e-7)
    outlier = torch.stack([reference, reference, reference + 1])
    assert inverse_distance_weights(outlier, reference)[2] < 1e-12


def test_band_schedule_has_the_golden_values(golden):
    case = golden("prr/pfa_schedule")
    bands = [band_schedule(int(number), rounds=50) for number in case["round"]]
    assert_close(torch.tensor(bands), case["L"], 1e-6)
    assert_close(torch.tensor(bands) / 2, case["half_width_r"], 1e-6)


@pytest.mark.parametrize(
    "name, kind, phase, output",
    [
        ("pfa_conv", "conv", "angle", "out"),
        ("pfa_conv", "conv", "angle", "out_official"),
        ("pfa_fc", "linear", "angle", "out"),
        ("pfa_lastfc", "classifier", "angle", "out"),
        ("pfa_conv_3clients_correct_divisor", "conv", "angle", "out"),
        ("pfa_near_identical_L095", "conv", "angle", "out_official"),
        ("pfa_near_identical_L095", "conv", "complex", "out_complex_mean"),
    ],
)
def test_fourier_average_has_the_golden_values(golden, name, kind, phase, output):
    case = golden(f"prr/{name}")
    assert_close(fourier_average(case["weights"], float(case["L"]), kind, phase), case[output])


def test_wrapped_angles_lead_far_from_the_mean_of_models_that_nearly_agree(golden):
    case = golden("prr/pfa_near_identical_L095")
    assert_close(weighted_mean(case["weights"], [1.0] * len(case["weights"])), case["fedavg_mean"])
    gaps = {
        phase: (fourier_average(case["weights"], float(case["L"]), phase=phase) - case["fedavg_mean"]).norm()
        for phase in ("angle", "complex")
    }
    assert gaps["angle"] > 0.2 * case["fedavg_mean"].norm() > 5 * gaps["complex"]


def test_averaged_kernels_lie_in_memory_in_their_own_order():
    assert fourier_average(normal(2, 4, 3, 3, 3), 0.7).is_contiguous()


def test_a_full_band_of_complex_numbers_is_the_mean():
    for kind, shape in {"conv": (6, 4, 2, 3), "linear": (6, 8), "classifier": (3, 16)}.items():
        tensors = normal(5, *shape)
        assert_close(fourier_average(tensors, 1.0, kind, "complex"), tensors.mean(0).expand_as(tensors), 1e-12)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("parts", ["both", "amplitude", "phase"])
def test_an_empty_band_shares_nothing(kind, parts):
    # Numbers of all sizes, the smallest of which would drown in the rounding of a transform and its inverse.
    tensors = normal(3, *SHAPES[kind], dtype=torch.float32) * torch.logspace(-12, 3, SHAPES[kind][-1])
    for band in (0.0, 1.9 / max(SHAPES[kind]) / 4):
        shared = fourier_average(tensors, band, kind, parts=parts)
        assert torch.equal(shared, tensors) and shared.data_ptr() != tensors.data_ptr()


@pytest.mark.parametrize("band", [-0.1, 1.1, float("nan")])
def test_a_band_that_is_no_share_is_refused(band):
    with pytest.raises(UserError, match=r"band=.* between 0 and 1"):
        fourier_average(normal(2, 4, 6), band, "linear")


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("phase", ["angle", "complex"])
@pytest.mark.parametrize("parts", ["both", "amplitude", "phase"])
def test_sites_that_agree_or_one_alone_get_back_what_they_sent(kind, phase, parts):
    single = normal(1, *SHAPES[kind], dtype=torch.float32)
    assert_close(fourier_average(single, 0.8, kind, phase, parts), single, 1e-6)
    agreed = single.expand(4, *SHAPES[kind])
    assert_close(fourier_average(agreed, 0.8, kind, phase, parts), agreed, 1e-6)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("phase", ["angle", "complex"])
@pytest.mark.parametrize("parts", ["both", "amplitude", "phase"])
def test_sites_may_be_transformed_a_few_at_a_time(kind, phase, parts, monkeypatch):
    tensors = normal(5, *SHAPES[kind])
    expected = fourier_average(tensors, 0.8, kind, phase, parts)
    monkeypatch.setattr(aggregation, "MOST_TRANSFORMED", 2 * tensors[0].numel())
    assert_close(fourier_average(tensors, 0.8, kind, phase, parts), expected, 1e-12)


@pytest.mark.parametrize("kind", SHAPES)
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(4)), band=st.floats(0, 1), phase=st.sampled_from(["angle", "complex"]))
def test_fourier_average_follows_the_order_of_sites(kind, order, band, phase):
    tensors = normal(4, *SHAPES[kind])
    expected = fourier_average(tensors, band, kind, phase)[order]
    assert_close(fourier_average(tensors[order], band, kind, phase), expected, 1e-9)


def test_the_band_is_half_open_around_the_zero_frequency():
    for size, band in ((8, 0.5), (7, 0.7), (16, 0.95)):
        tensors = normal(3, 2, size)
        spectra = torch.fft.fftshift(torch.fft.fft(tensors), dim=-1)
        half = int(size * band / 2)
        inside = slice(size // 2 - half, size // 2 + half)
        spectra[..., inside] = spectra[..., inside].mean(0)
        expected = torch.fft.ifft(torch.fft.ifftshift(spectra, dim=-1)).real
        assert_close(fourier_average(tensors, band, "classifier", "complex"), expected, 1e-12)


def test_amplitude_or_phase_alone_is_shared_in_the_band():
    tensors = normal(3, 6, 8)
    spectra = torch.fft.fft2(tensors)
    for parts, keep, share in (("amplitude", torch.angle, torch.abs), ("phase", torch.abs, torch.angle)):
        merged = torch.fft.fft2(fourier_average(tensors, 0.8, "linear", parts=parts))
        # Frequencies (1, 1) and (-1, -1) are both in the band, so dropping imaginary parts leaves them alone.
        assert_close(keep(merged[:, 1, 1]), keep(spectra[:, 1, 1]), 1e-9)
        assert_close(share(merged[:, 1, 1]), share(spectra[:, 1, 1]).mean(0).expand(3), 1e-9)


def test_rounding_does_not_turn_an_angle_of_pi_into_minus_pi():
    # Rows whose sum is negative: the zero frequency has the angle pi, its imaginary part only rounding.
    tensors = -normal(6, 3, 9).abs() - 1
    shared = fourier_average(tensors, 0.3, "classifier")
    assert_close(shared.sum(-1), tensors.sum(-1).mean(0).expand(6, 3), 1e-12)


@pytest.mark.parametrize("choice", [{"kind": "bias"}, {"phase": "wrapped"}, {"parts": "none"}])
def test_unknown_variants_are_refused(choice):
    with pytest.raises(UserError, match=f"{next(iter(choice))}=.*choose one of"):
        fourier_average(normal(2, 3, 4), 0.7, **choice)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("phase", ["angle", "complex"])
def test_layers_of_one_shape_merge_together_as_each_alone(kind, phase):
    layers = normal(3, 4, *SHAPES[kind])
    together = fourier_average(layers, 0.8, kind, phase)
    alone = torch.stack([fourier_average(layers[:, place], 0.8, kind, phase) for place in range(4)], dim=1)
    assert_close(together, alone, 1e-12)


def by_whole_spectra(signals: Tensor, band: float, phase: str, parts: str) -> Tensor:
    """What each site gets, by whole complex spectra in float64 and a mask, as the paper writes it."""
    spectra = torch.fft.fft2(signals)
    size = torch.tensor(signals.shape[1:])
    centre, half = size // 2, (size * band / 2).floor().long()
    inside = torch.zeros(signals.shape[1:], dtype=torch.bool)
    inside[centre[0] - half[0] : centre[0] + half[0], centre[1] - half[1] : centre[1] + half[1]] = True
    mean = spectra.mean(0)
    amplitude = spectra.abs().mean(0) if phase == "angle" else mean.abs()
    angle = spectra.angle().mean(0) if phase == "angle" else mean.angle()
    shared = torch.polar(
        spectra.abs() if parts == "phase" else amplitude.expand(spectra.shape),
        spectra.angle() if parts == "amplitude" else angle.expand(spectra.shape),
    )
    return torch.fft.ifft2(torch.where(torch.fft.ifftshift(inside), shared, spectra)).real


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("columns", [1, 2, 5, 6])
@pytest.mark.parametrize(
    ("phase", "parts"), [("angle", "both"), ("complex", "both"), ("angle", "amplitude"), ("complex", "phase")]
)
@pytest.mark.parametrize("band", [0.5, 0.8, 1.0])
def test_half_spectra_give_what_whole_ones_give(rows, columns, phase, parts, band):
    signals = normal(3, rows, columns, dtype=torch.float64)
    expected = by_whole_spectra(signals, band, phase, parts)
    assert_close(fourier_average(signals, band, "linear", phase, parts), expected, 1e-12)
