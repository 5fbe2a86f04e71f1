"""Quick upsampling and quick means and variances, which FedBM's generator trains by: what torch's give.

The kernels run here in Triton's interpreter where Triton is installed, and on a GPU where there is one.
"""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from closeness import assert_close
from equipoise.nets.conditional_generator import ConditionalGenerator
from equipoise.nets.kernels import doubling, moments, quicken
from equipoise.nets.kernels.doubling import QuickUpsample, quicken_doubling
from equipoise.nets.kernels.moments import channel_moments
from kernel_tools import DEVICE, FITTING, fake_images, loaded, random_images, require_triton, stand_in

SHAPES = [(1, 1, 2, 2), (1, 3, 6, 4), (2, 24, 4, 10), (3, 40, 5, 7), (2, 136, 9, 3), (3, 8, 24, 20)]


@pytest.fixture
def triton():
    """Kernels can run, on a GPU or in Triton's interpreter."""
    require_triton()


@pytest.mark.parametrize("shape", SHAPES)
def test_doubling_gives_torchs_values_and_first_and_second_gradients(triton, shape):
    kernels = loaded(doubling.KERNELS)
    images = random_images(shape, offset=3)
    weights = torch.randn(shape[0], shape[1], 2 * shape[2], 2 * shape[3], device=DEVICE)

    def results(double):
        x = images.clone().requires_grad_()
        out = double(x)
        first = torch.autograd.grad(out, x, weights)
        (again,) = torch.autograd.grad((weights * double(x) ** 3).sum(), x, create_graph=True)
        return out, *first, again, *torch.autograd.grad((again**2).sum(), x)

    quick, usual = results(kernels.Doubling.apply), results(lambda x: F.interpolate(x, scale_factor=2))
    assert torch.equal(quick[0], usual[0]) and quick[0].is_contiguous(memory_format=torch.channels_last)
    for ours, torchs in zip(quick[1:], usual[1:], strict=True):
        assert_close(ours, torchs)


@pytest.mark.parametrize("shape", SHAPES)
def test_moments_give_torchs_values_and_first_and_second_gradients(triton, shape):
    kernels = loaded(moments.KERNELS)
    images, weights = random_images(shape, offset=3), torch.linspace(-1, 2, shape[1], device=DEVICE)

    def results(of):
        x = images.clone().requires_grad_()
        mean, variance = of(x)
        loss = (weights * (mean**2 + variance**2)).sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, create_graph=True)
        return mean, variance, *first, again, *torch.autograd.grad((again**2).sum(), x)

    for ours, torchs in zip(results(kernels.Moments.apply), results(moments._by_torch), strict=True):
        assert_close(ours, torchs)


def test_what_is_no_number_spoils_the_moments_of_its_own_channel_alone(triton):
    kernels = loaded(moments.KERNELS)
    images = random_images((2, 8, 4, 4), offset=3)
    images[1, 2, 0, 0], images[0, 5, 3, 3] = torch.nan, torch.inf
    mean, variance = kernels.Moments.apply(images)
    fine = [channel for channel in range(8) if channel not in (2, 5)]
    expected = moments._by_torch(images)
    assert_close(mean[fine], expected[0][fine])
    assert_close(variance[fine], expected[1][fine])
    assert mean[2].isnan() and variance[2].isnan() and not mean[5].isfinite() and not variance[5].isfinite()


def test_both_prove_themselves(triton):
    for kernels in (doubling.KERNELS, moments.KERNELS):
        kernels.prove(loaded(kernels), torch.device(DEVICE))


def test_kernels_with_wrong_values_do_not_pass(monkeypatch):
    stand_in(monkeypatch, doubling.KERNELS, Doubling=lambda x: F.interpolate(x.float(), scale_factor=2) * 1.1)
    stand_in(
        monkeypatch, moments.KERNELS, Moments=lambda x: (x.float().mean((0, 2, 3)), x.float().var((0, 2, 3)) * 1.1)
    )
    for kernels in (doubling.KERNELS, moments.KERNELS):
        with pytest.raises(AssertionError, match="other values"):
            kernels.prove(kernels.module, torch.device(DEVICE))


@pytest.mark.parametrize(("images", "fit"), FITTING)
def test_the_kernels_are_for_bfloat16_images_channels_last_on_a_gpu(monkeypatch, images, fit):
    taken = []
    stand_in(monkeypatch, doubling.KERNELS, Doubling=taken.append)
    stand_in(monkeypatch, moments.KERNELS, Moments=taken.append)
    with FakeTensorMode():
        QuickUpsample(scale_factor=2)(fake_images(**images))
        channel_moments(fake_images(**images))
    assert len(taken) == (2 if fit else 0)


def test_without_kernels_torch_gives_means_and_variances():
    images = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    mean, variance = channel_moments(images)
    assert torch.allclose(mean, images.mean((0, 2, 3))) and mean.dtype == torch.float64
    assert torch.allclose(variance, images.var((0, 2, 3), correction=0))


def test_a_quick_generator_has_the_same_state_and_gives_the_same_images_elsewhere(monkeypatch):
    stand_in(monkeypatch, doubling.KERNELS)
    plain = ConditionalGenerator(4, 16, width=8)
    quick = copy.deepcopy(plain)
    quicken(quick)
    assert sum(isinstance(layer, QuickUpsample) for layer in quick.modules()) == 4
    assert list(quick.state_dict()) == list(plain.state_dict())
    codes = torch.randn(3, 4)
    assert torch.equal(quick(codes), plain(codes))


def test_other_upsampling_is_left_alone(monkeypatch):
    stand_in(monkeypatch, doubling.KERNELS)
    layers = [nn.Upsample(scale_factor=3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(size=(4, 4))]
    net = nn.Sequential(*layers)
    quicken_doubling(net)
    assert all(type(layer) is nn.Upsample for layer in net)
