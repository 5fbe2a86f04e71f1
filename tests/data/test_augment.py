"""Augmentation: each operation against a per-image reference, and what every pipeline promises."""

import colorsys
import math
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from pydantic import ValidationError
from scipy import ndimage
from torch import Tensor

from equipoise.core.errors import UserError
from equipoise.data.augment import AugmentConfig, build_augmentation, shades_of_grey
from equipoise.data.augment.augment_config import PipelineName
from equipoise.data.augment.colour import (
    Brightness,
    ColourJitter,
    Greyscale,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
)
from equipoise.data.augment.draws import Photometric, Samples, allot
from equipoise.data.augment.filters import (
    BinomialBlur,
    GaussianBlur,
    GaussianNoise,
    MedianBlur,
    OneOf,
    median_filter,
)
from equipoise.data.augment.geometry import (
    Flip,
    Mirror,
    Resize,
    ResizedCrop,
    ShiftScaleRotate,
    Warp,
    compose,
    sample,
    sampling_grid,
    similarity,
)
from equipoise.data.augment.pipelines import PIPELINES
from equipoise.data.augment.randaugment import FAMILIES, NOTHING, Draw, Operation, RandAugment

RANDOM = sorted(set(PIPELINES) - {"none", "fedbm"})


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 4, size: int = 24, channels: int = 3, seed: int = 0) -> Tensor:
    """Smooth random uint8 images (count, channels, size, size): neighbours resemble each other."""
    noise = np.random.default_rng(seed).normal(size=(count, channels, size, size))
    smooth = ndimage.gaussian_filter(noise, (0, 0, 2, 2), mode="wrap")
    smooth = (smooth - smooth.min()) / (smooth.max() - smooth.min())
    return torch.from_numpy((smooth * 255).round().astype(np.uint8))


def as_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pil(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float()


def assert_levels(actual: Tensor, expected: Tensor, within: float = 1.0) -> None:
    """Equal up to rounding: libraries for images of 8 bits round or truncate after every operation."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=within)


def one_operation(batch: Samples, operation: int, strength: float, sign: float = 1.0) -> Samples:
    """One of RandAugment's operations, done by its family, on every image."""
    family = next(family for family in FAMILIES if operation in family.operations)
    choice, *numbers = (torch.full((len(batch.images),), value) for value in (operation, strength, sign))
    return family.apply(batch, Draw(choice, *numbers))


# Draws


@given(
    count=st.integers(0, 40),
    shares=st.lists(st.floats(0, 0.25), max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_dealing_gives_an_image_to_one_share_at_most_and_each_share_its_due(count, shares, seed):
    owners = torch.zeros(count, dtype=torch.long)
    for share, (index, chosen) in zip(shares, allot(torch.empty(count, 1), shares, seeded(seed))):
        assert abs(int(chosen.sum()) - share * count) < 1
        owners[index[chosen]] += 1
    assert (owners <= 1).all()


def test_dealing_leaves_nobody_out_when_shares_add_up_to_one():
    for count in range(1, 20):
        dealt = allot(torch.empty(count, 1), (0.25, 0.5, 0.25), seeded(count))
        owned = torch.cat([index[chosen] for index, chosen in dealt])
        assert sorted(owned.tolist()) == list(range(count))


@pytest.mark.parametrize("count", [1, 7])
def test_dealing_gives_every_image_the_chances_asked_for(count):
    generator = seeded()
    belongs = torch.zeros(2, count)
    for _ in range(1500):
        for share, (index, chosen) in zip(belongs, allot(torch.empty(count, 1), (0.1, 0.3), generator)):
            share[index[chosen]] += 1
    expected = torch.tensor([[0.1], [0.3]]).expand(2, count)
    torch.testing.assert_close(belongs / 1500, expected, rtol=0, atol=0.04)


# Colour


def test_hue_turns_as_in_hue_saturation_value():
    images = pictures(2, size=6)
    images[0, :, 0, 0] = 77  # a grey pixel has no hue
    turns = torch.tensor([0.13, -0.4])
    changed = adjust_hue(images.float(), turns)
    for image, turn, result in zip(images, turns, changed):
        for row in range(6):
            for column in range(6):
                hue, saturation, value = colorsys.rgb_to_hsv(*(image[:, row, column] / 255).tolist())
                expected = colorsys.hsv_to_rgb((hue + turn.item()) % 1, saturation, value)
                assert_levels(result[:, row, column], 255 * torch.tensor(expected), within=0.01)


@pytest.mark.parametrize(
    ("adjust", "reference"),
    [
        (adjust_brightness, ImageEnhance.Brightness),
        (adjust_contrast, ImageEnhance.Contrast),
        (adjust_saturation, ImageEnhance.Color),
    ],
)
def test_light_and_colour_change_as_in_pillow(adjust, reference):
    images = pictures()
    factors = torch.tensor([0.0, 0.6, 1.0, 1.7])
    changed = adjust(images.float(), factors)
    for image, factor, result in zip(images, factors.tolist(), changed):
        # Pillow rounds the reference of a blend before it blends.
        assert_levels(result, from_pil(reference(as_pil(image)).enhance(factor)), within=1.5)


def test_greyscale_leaves_luma_in_every_channel():
    images = pictures()
    for image, result in zip(images, Greyscale(1.0).change(images.float(), seeded())):
        assert_levels(result, from_pil(as_pil(image).convert("L").convert("RGB")))


def test_brightness_adds_one_amount_per_image_within_its_limit():
    images = torch.full((200, 1, 2, 2), 100, dtype=torch.uint8)
    shift = Brightness(0.2, probability=0.75).change(images.float(), seeded()) - 100
    assert (shift == shift[:, :, :1, :1]).all()
    assert shift.abs().max() <= 0.2 * 255
    assert 0.6 < (shift[:, 0, 0, 0] != 0).float().mean() < 0.9


def test_shades_of_grey_makes_the_light_grey():
    images = pictures(3)
    images[:, 2] //= 2  # a yellow light
    for image, result in zip(images, shades_of_grey(images, power=6)):
        levels = image.permute(1, 2, 0).numpy().astype(np.float64)
        light = np.power(np.power(levels, 6).mean((0, 1)), 1 / 6)
        light /= np.sqrt((light**2).sum())
        expected = np.clip(np.round(levels / (light * np.sqrt(3))), 0, 255)
        assert result.dtype == torch.uint8
        assert np.array_equal(result.permute(1, 2, 0).numpy(), expected)


def test_shades_of_grey_leaves_grey_images_alone():
    single = pictures(2, channels=1)
    assert torch.equal(shades_of_grey(single), single)
    assert torch.equal(shades_of_grey(single.expand(2, 3, -1, -1)), single.expand(2, 3, -1, -1))


# Filters


@pytest.mark.parametrize("size", [3, 5])
def test_median_filter_is_the_median_of_every_window(size):
    images = pictures(2, size=13)
    expected = ndimage.median_filter(images.numpy(), size=(1, 1, size, size), mode="nearest")
    assert np.array_equal(median_filter(images, size).numpy(), expected)


def test_gaussian_blur_has_its_own_width_per_image():
    images = pictures(3, size=16)
    blurred = GaussianBlur(kernel=(5, 9), sigma=(0.1, 5.0)).change(images.float(), seeded(1))
    sigmas = torch.rand(3, generator=seeded(1)) * 4.9 + 0.1
    for image, sigma, result in zip(images, sigmas.tolist(), blurred):
        expected = image.double().numpy()
        for axis, taps in ((2, 5), (1, 9)):
            weights = np.exp(-0.5 * ((np.arange(taps) - taps // 2) / sigma) ** 2)
            expected = ndimage.correlate1d(expected, weights / weights.sum(), axis=axis, mode="mirror")
        assert_levels(result, torch.from_numpy(expected).float(), within=0.01)


@pytest.mark.parametrize(("size", "weights"), [(3, [0, 1, 2, 1, 0]), (5, [1, 4, 6, 4, 1])])
def test_binomial_blur_spreads_a_point_by_pascals_triangle(size, weights):
    point = torch.zeros(2, 1, 9, 9)
    point[..., 4, 4] = 1.0
    row = torch.tensor(weights) / sum(weights)
    torch.testing.assert_close(BinomialBlur(size).change(point, None)[1, 0, 2:7, 2:7], row[:, None] * row)


def test_noise_has_the_variance_asked_for():
    images = torch.full((40, 1, 40, 40), 128.0)
    variances = (GaussianNoise(variance=(5.0, 30.0)).change(images, seeded()) - images).var(dim=(1, 2, 3))
    assert variances.min() > 4
    assert variances.max() < 34
    assert variances.max() - variances.min() > 15


@pytest.mark.parametrize("count", [1, 5, 64])
def test_one_of_several_steps_changes_each_image_once(count):
    steps = OneOf(tuple((Shift(amount), 0.25) for amount in (1.0, 2.0, 4.0, 8.0)))
    for seed in range(20):
        changed = steps.change(torch.zeros(count, 1, 1, 1), seeded(seed)).flatten()
        assert set(changed.tolist()) <= {1.0, 2.0, 4.0, 8.0}
    assert count < 64 or torch.bincount(changed.long())[[1, 2, 4, 8]].tolist() == [16, 16, 16, 16]


@dataclass(frozen=True)
class Shift(Photometric):
    amount: float

    def change(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        return images + self.amount


# Geometry


def turned(images: Tensor, degrees: float, growth: float = 1.0, across: float = 0.0, down: float = 0.0) -> Tensor:
    numbers = (math.radians(degrees), growth, across, down)
    maps = similarity(*(torch.full((len(images),), number).double() for number in numbers), images)
    size = images.shape[-1]
    return sample(images.float(), sampling_grid(maps, size, size), "zeros")


def test_a_map_that_does_nothing_gives_the_image_back():
    images = pictures()
    assert_levels(turned(images, 0), images.float(), within=0.01)


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_rotation_by_quarter_turns_is_exact(quarters):
    images = pictures()
    assert_levels(turned(images, 90 * quarters), images.float().rot90(quarters, (-2, -1)), within=0.01)


def test_rotation_by_any_angle_is_pillows():
    images = pictures(1, size=32)
    expected = from_pil(as_pil(images[0]).rotate(20, resample=Image.Resampling.BILINEAR))
    assert_levels(turned(images, 20)[0, :, 8:24, 8:24], expected[:, 8:24, 8:24])


def test_shift_and_growth_move_the_image_as_they_say():
    images = pictures(1, size=20)
    moved = turned(images, 0, across=0.5, down=-0.2)  # of a half-width: 5 pixels right, 2 up
    assert_levels(moved[..., :18, 5:], images.float()[..., 2:, :15], within=0.01)
    doubled = turned(images, 0, growth=2.0)
    expected = torch.nn.functional.interpolate(images[..., 5:15, 5:15].float(), scale_factor=2, mode="bilinear")
    assert_levels(doubled[..., 2:-2, 2:-2], expected[..., 2:-2, 2:-2], within=0.01)


def test_maps_compose_in_the_order_of_the_steps():
    images = pictures(1)
    quarter = torch.tensor([math.pi / 2]).double()
    none, one, half = (torch.tensor([number]).double() for number in (0.0, 1.0, 0.5))
    rotate = similarity(quarter, one, none, none, images)
    shift = similarity(none, one, half, none, images)
    together = sample(images.float(), sampling_grid(compose([rotate, shift]), 24, 24), "zeros")
    one_by_one = turned(turned(images, 90), 0, across=0.5)
    assert_levels(together, one_by_one, within=0.01)


def test_reflection_does_not_repeat_the_outermost_pixel():
    images = pictures(1, size=16)
    maps = similarity(*(torch.tensor([number]).double() for number in (0.0, 1.0, 0.5, 0.0)), images)
    moved = sample(images.float(), sampling_grid(maps, 16, 16), "reflection")
    assert_levels(moved[..., :4], images.float()[..., 1:5].flip(-1), within=0.01)


def test_flipping_by_a_map_and_by_copying_agree():
    images = pictures(16)
    mirror = Mirror(0.5, 0.5)
    copied = Flip(mirror)(Samples(images.float(), None), seeded()).images
    sampled = Warp((mirror,), size=24)(Samples(images.float(), None), seeded()).images
    assert_levels(sampled, copied, within=0.01)
    assert not torch.equal(copied, images.float())


def test_crop_windows_have_areas_and_ratios_in_range_and_stay_inside():
    images = torch.empty(2000, 1, 1, 1)
    maps = ResizedCrop(area=(0.08, 1.0))(images, seeded())
    width, height, centre = maps[:, 0, 0], maps[:, 1, 1], maps[:, :2, 2].abs()
    area, ratio = width * height, width / height
    assert area.min() >= 0.08 - 1e-9
    assert area.max() <= 1 + 1e-9
    assert ratio.min() >= 3 / 4 - 1e-9
    assert ratio.max() <= 4 / 3 + 1e-9
    assert (centre + torch.stack([width, height], dim=1) <= 1 + 1e-9).all()
    assert (area < 0.3).float().mean() > 0.2  # small windows are common


def test_a_crop_that_never_fits_is_the_whole_image():
    maps = ResizedCrop(area=(1.0, 1.0), ratio=(2.0, 2.0))(torch.empty(3, 1, 1, 1), seeded())
    assert torch.equal(maps, torch.eye(3, dtype=torch.float64).expand(3, 3, 3))


@pytest.mark.parametrize(
    "step",
    [
        Flip(Mirror(0.5, 0.5)),
        Warp((ResizedCrop(), Mirror(0.5), ShiftScaleRotate(degrees=40, shift=0.2, scale=0.2)), size=24),
        Warp((ShiftScaleRotate(degrees=40, shift=0.3),), size=24, padding="reflection"),
        Resize(36, crop=30),
        *(
            partial(one_operation, operation=move, strength=0.8)
            for move in (Operation.ROTATE, Operation.SHEAR_X, Operation.TRANSLATE_Y)
        ),
    ],
    ids=["flip", "crop", "reflected", "resize", "rotate", "shear", "translate"],
)
def test_masks_go_where_their_images_go(step):
    masks = (pictures(24, size=24, channels=1)[:, 0] > 127).long()
    batch = Samples(masks[:, None] * 255.0, masks)
    moved, moved_masks = step(batch) if isinstance(step, partial) else step(batch, seeded())
    assert moved_masks.shape == moved[:, 0].shape
    assert moved_masks.dtype == masks.dtype
    agreement = ((moved[:, 0] > 127.5) == moved_masks).float().mean(dim=(1, 2))
    assert agreement.min() > 0.93  # interpolation blurs the outlines


# RandAugment


def solarise_add(image: Image.Image) -> Image.Image:
    return image.point([min(255, level + 55) if level < 128 else level for level in range(256)] * 3)


@pytest.mark.parametrize(
    ("operation", "strength", "reference"),
    [
        (Operation.AUTO_CONTRAST, 1.0, ImageOps.autocontrast),
        (Operation.EQUALISE, 1.0, ImageOps.equalize),
        (Operation.INVERT, 1.0, ImageOps.invert),
        (Operation.POSTERISE, 0.8, lambda image: ImageOps.posterize(image, 3)),
        (Operation.POSTERISE, 1.0, lambda image: ImageOps.posterize(image, 4)),
        (Operation.SOLARISE, 0.5, lambda image: ImageOps.solarize(image, 128)),
        (Operation.SOLARISE, 1.0, lambda image: image),
        (Operation.SOLARISE_ADD, 0.5, solarise_add),
    ],
)
def test_tone_operations_are_pillows_to_the_level(operation, strength, reference):
    images = pictures(3)
    images[1] //= 3  # dark
    images[2, 1] = 90  # one channel constant
    for image, result in zip(images, one_operation(Samples(images.float(), None), operation, strength).images):
        assert_levels(result, from_pil(reference(as_pil(image))), within=0.01)


@pytest.mark.parametrize("strength", [0.2, 1.0])
@pytest.mark.parametrize(
    ("operation", "reference"),
    [
        (Operation.COLOUR, ImageEnhance.Color),
        (Operation.CONTRAST, ImageEnhance.Contrast),
        (Operation.BRIGHTNESS, ImageEnhance.Brightness),
        (Operation.SHARPNESS, ImageEnhance.Sharpness),
    ],
)
def test_enhancements_are_pillows(operation, reference, strength):
    images = pictures()
    for image, result in zip(images, one_operation(Samples(images.float(), None), operation, strength).images):
        assert_levels(result, from_pil(reference(as_pil(image)).enhance(1.8 * strength + 0.1)), within=1.5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("operation", "coefficients"),
    [
        (Operation.SHEAR_X, lambda amount, size: (1, 0.3 * amount, 0, 0, 1, 0)),
        (Operation.SHEAR_Y, lambda amount, size: (1, 0, 0, 0.3 * amount, 1, 0)),
        (Operation.TRANSLATE_X, lambda amount, size: (1, 0, 0.45 * amount * size, 0, 1, 0)),
        (Operation.TRANSLATE_Y, lambda amount, size: (1, 0, 0, 0, 1, 0.45 * amount * size)),
    ],
)
def test_moves_are_pillows_with_the_mean_colour_outside(operation, coefficients, sign):
    images = pictures(1, size=40)
    moved = one_operation(Samples(images.float(), None), operation, 1.0, sign).images[0]
    arguments = coefficients(sign, 40)
    expected = from_pil(
        as_pil(images[0]).transform(
            (40, 40), Image.Transform.AFFINE, arguments, Image.Resampling.BILINEAR, fillcolor=(124, 116, 104)
        )
    )
    inside = from_pil(
        Image.new("RGB", (40, 40), (255, 255, 255)).transform(
            (40, 40), Image.Transform.AFFINE, arguments, Image.Resampling.BILINEAR
        )
    )
    edge = torch.from_numpy(ndimage.binary_dilation(np.diff(inside[0].numpy(), prepend=0) != 0, iterations=2))
    edge |= torch.from_numpy(ndimage.binary_dilation(np.diff(inside[0].numpy(), 1, 0, 0) != 0, iterations=2))
    assert (~edge).float().mean() > 0.5
    assert_levels(moved[:, ~edge], expected[:, ~edge], within=1.5)


def test_whoever_draws_nothing_is_left_alone():
    images = pictures().float()
    nothing = Draw(torch.full((4,), NOTHING), torch.ones(4), torch.ones(4))
    for family in FAMILIES:
        assert_levels(family.apply(Samples(images, None), nothing).images, images, within=0.01)


def test_families_hold_every_operation_once():
    assert [operation for family in FAMILIES for operation in family.operations] == list(Operation)


def test_each_image_draws_its_own_operation_strength_and_sign():
    chosen = torch.arange(6000) % 2 == 0
    draw = RandAugment().draw(range(3, 8), chosen, seeded())
    assert (draw.choice[~chosen] == NOTHING).all()
    shares = torch.bincount(draw.choice[chosen]) / 3000
    torch.testing.assert_close(shares[3:], torch.full((5,), 0.2), rtol=0, atol=0.03)
    assert draw.strength.max() == 1
    assert 0.45 < (draw.strength == 1).float().mean() < 0.55  # half of the draws around 10 are clipped to it
    assert draw.strength.min() > 0.75
    assert 0.47 < (draw.sign > 0).float().mean() < 0.53


def test_half_of_the_images_keep_a_layer_unchanged():
    images = pictures(300, size=20).float()
    changed = RandAugment(layers=1, magnitude=8.0)(Samples(images, None), seeded()).images
    untouched = ((changed - images).abs().amax(dim=(1, 2, 3)) < 0.01).float().mean()
    assert 0.49 < untouched < 0.54  # solarising an image without bright pixels shows nothing


# Pipelines


def test_every_name_of_the_configuration_is_a_pipeline():
    assert get_args(PipelineName) == tuple(PIPELINES)


@pytest.mark.parametrize("name", PIPELINES)
def test_needs_no_value_on_the_host(name):
    """On the meta device there are no values: what would wait for one, or shape by one, fails."""
    augmentation = build_augmentation(AugmentConfig(name=name), size=32, channels=3)
    images = torch.empty(4, 3, 32, 32, dtype=torch.uint8, device="meta")
    masks = torch.empty(4, 32, 32, dtype=torch.long, device="meta")
    for transform in (*augmentation.views, augmentation.plain):
        moved, moved_masks = transform(images, None, masks)
        assert moved.shape == (4, 3, 32, 32)
        assert moved_masks.shape == (4, 32, 32)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PIPELINES)
def test_gives_finite_levels_of_the_size_asked_for(name, channels):
    images = pictures(6, size=32, channels=channels)
    for size in (24, 32, 48):
        config = AugmentConfig(name=name, size=size, normalise="none")
        augmentation = build_augmentation(config, size=32, channels=channels)
        assert augmentation.size == size
        for transform in (*augmentation.views, augmentation.plain):
            augmented = transform(images, seeded())
            assert augmented.shape == (6, channels, size, size)
            assert augmented.dtype == torch.float32
            assert augmented.min() >= 0
            assert augmented.max() <= 1


@pytest.mark.parametrize("name", PIPELINES)
def test_the_generator_decides_the_bits(name):
    images = pictures(6, size=32)
    augmentation = build_augmentation(AugmentConfig(name=name), size=32, channels=3)
    for view in augmentation.views:
        assert torch.equal(view(images, seeded(1)), view(images, seeded(1)))
        assert torch.equal(view(images, seeded(1)), view(images, seeded(2))) == (name not in RANDOM)


@pytest.mark.parametrize("name", RANDOM)
def test_every_image_of_a_batch_has_its_own_fate(name):
    images = pictures(1, size=32).expand(64, -1, -1, -1)
    for view in build_augmentation(AugmentConfig(name=name), size=32, channels=3).views:
        distinct = view(images, seeded()).flatten(1).unique(dim=0)
        assert len(distinct) == 4 if name == "flips" else len(distinct) > 40


@pytest.mark.parametrize("name", PIPELINES)
def test_the_input_is_left_as_it_was_and_evaluation_is_not_random(name):
    images = pictures(4, size=32)
    before = images.clone()
    augmentation = build_augmentation(AugmentConfig(name=name), size=32, channels=3)
    augmentation.view(0)(images, seeded())
    assert torch.equal(augmentation.plain(images), augmentation.plain(images, seeded()))
    assert torch.equal(images, before)


@pytest.mark.parametrize(
    "step",
    [
        Brightness(0.2, probability=0),
        ColourJitter(0.4, 0.4, 0.4, 0.1, probability=0),
        Greyscale(0),
        OneOf(((MedianBlur(5), 0.0), (GaussianNoise((5.0, 30.0)), 0.0))),
        Flip(Mirror(0, 0)),
        Warp((Mirror(0, 0), ShiftScaleRotate(15, 0.1, 0.1, probability=0)), size=24),
        RandAugment(probability=0),
    ],
)
def test_steps_of_probability_0_change_nothing(step):
    images = pictures().float()
    assert_levels(step(Samples(images, None), seeded()).images, images, within=0.01)


def test_a_second_view_is_the_papers_or_another_draw():
    fediic = build_augmentation(AugmentConfig(name="fediic"), size=32, channels=3)
    assert fediic.view(0) is fediic.views[0]
    assert fediic.view(1) is fediic.views[1]
    prr = build_augmentation(AugmentConfig(name="prr"), size=32, channels=3)
    assert prr.view(1) is prr.view(0)


def test_fediic_evaluates_the_centre_of_a_slightly_larger_image():
    images = pictures(1, size=64)
    config = AugmentConfig(name="fediic", size=56, normalise="none")
    plain = build_augmentation(config, size=64, channels=3).plain(images) * 255
    assert_levels(plain, images[..., 4:60, 4:60].float(), within=0.01)
    resized = as_pil(images[0]).resize((37, 37), Image.Resampling.BILINEAR).crop((2, 2, 34, 34))
    smaller = build_augmentation(config.model_copy(update={"size": 32}), size=64, channels=3).plain(images)
    assert_levels(smaller[0] * 255, from_pil(resized))


@pytest.mark.parametrize(
    ("settings", "channels", "mean", "std"),
    [
        ({"name": "none"}, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ({"name": "fednpr-ich"}, 1, (0.456,), (0.224,)),
        ({"name": "prr"}, 3, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ({"name": "prr", "normalise": "imagenet"}, 1, (0.456,), (0.224,)),
        ({"name": "fediic", "normalise": "none"}, 1, (0.0,), (1.0,)),
        ({"name": "none", "mean": (0.1, 0.2), "std": (0.3, 0.4)}, 2, (0.1, 0.2), (0.3, 0.4)),
    ],
)
def test_output_is_normalised_per_channel(settings, channels, mean, std):
    images = pictures(2, size=32, channels=channels)
    config = AugmentConfig(size=28 if settings["name"] == "fediic" else 32, **settings)
    normalised = build_augmentation(config, size=32, channels=channels).plain(images)
    raw = images[..., 2:30, 2:30] if settings["name"] == "fediic" else images
    expected = (raw / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(normalised, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"mean": (0.5,)}, {"mean": (0.5,), "std": (0.5,)}, {"mean": (0.5,) * 3, "std": (0.5, 0.5, 0.0)}],
)
def test_statistics_that_do_not_fit_the_channels_are_refused(settings):
    with pytest.raises(UserError, match=r"augment\.mean"):
        build_augmentation(AugmentConfig(**settings), size=32, channels=3)


def test_images_that_are_not_square_are_refused():
    plain = build_augmentation(AugmentConfig(), size=32, channels=3).plain
    with pytest.raises(UserError, match="square"):
        plain(torch.zeros(1, 3, 20, 32, dtype=torch.uint8))


@pytest.mark.parametrize("settings", [{"name": "cutmix"}, {"size": 4}, {"strength": 2}])
def test_unknown_or_impossible_settings_are_refused(settings):
    with pytest.raises(ValidationError):
        AugmentConfig(**settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PIPELINES)
def test_never_waits_for_the_device(name):
    images = pictures(8, size=32).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    augmentation = build_augmentation(AugmentConfig(name=name), size=32, channels=3)
    transforms = (*augmentation.views, augmentation.plain)
    for transform in transforms:
        transform(images, generator)  # constants are copied to the device once
    torch.cuda.set_sync_debug_mode("error")
    try:
        for transform in transforms:
            transform(images, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("size", [32, 224])
def test_crops_of_fediic_are_not_mixed_with_black_at_the_border(size):
    config = AugmentConfig(name="fediic", size=size, normalise="none")
    even = torch.full((50, 3, 64, 64), 200, dtype=torch.uint8)
    images = build_augmentation(config, size=64, channels=3).view(1)(even, seeded())
    assert (images.amax((2, 3)) - images.amin((2, 3))).max() < 0.01


def test_fednpr_blurs_images_as_they_are_stored():
    def blurred(stored: int, width: int) -> float:
        """The share of pixels that are neither black nor white, where a white square of this width was stored."""
        square = torch.zeros(200, 3, stored, stored, dtype=torch.uint8)
        inside = slice((stored - width) // 2, (stored + width) // 2)
        square[:, :, inside, inside] = 255
        config = AugmentConfig(name="fednpr", size=64, normalise="none")
        images = build_augmentation(config, size=stored, channels=3).view(0)(square, seeded())
        return float(((images > 0.02) & (images < 0.98)).float().mean((1, 2, 3)).median())

    assert blurred(128, 16) < 0.7 * blurred(64, 8)
