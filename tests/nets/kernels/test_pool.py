"""The quick max pooling: what torch's gives, bit for bit, in values and gradients.

Its kernels run here in Triton's interpreter where Triton is installed, and on a GPU where there is one.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from equipoise.nets import NetConfig, build_net
from equipoise.nets.kernels.pool import KERNELS, QuickMaxPool2d, quicken_pools
from kernel_tools import DEVICE, loaded, stand_in

SHAPES = [(1, 1, 2, 2), (1, 3, 6, 4), (2, 24, 4, 10), (3, 40, 8, 6), (2, 64, 6, 6), (1, 136, 4, 4)]


@pytest.fixture
def kernels():
    return loaded(KERNELS)


def random_images(shape, dtype=torch.float32):
    """Images (B, C, H, W), channels last, as they come out of ReLU: about half of the values are 0."""
    torch.manual_seed(0)
    return torch.relu(torch.randn(shape, device=DEVICE)).to(dtype).contiguous(memory_format=torch.channels_last)


def pooled_with_gradient(pool, images, gradient):
    variable = images.clone().requires_grad_()
    out = pool(variable)
    return out.detach(), *torch.autograd.grad(out, variable, gradient)


def assert_same_bits(quick, usual):
    """Equal values and signs, channels last; any NaN is as good as another."""
    assert quick.dtype == usual.dtype and quick.shape == usual.shape
    assert quick.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(quick.isnan(), usual.isnan())
    assert torch.equal(quick.nan_to_num(), usual.nan_to_num())
    assert torch.equal(quick.signbit() & ~quick.isnan(), usual.signbit() & ~usual.isnan())


def assert_pools_as_torch(kernels, images):
    halves = (*images.shape[:2], images.shape[2] // 2, images.shape[3] // 2)
    gradient = torch.randn(halves, device=DEVICE).to(images.dtype)
    quick = pooled_with_gradient(kernels.MaxPoolTraining.apply, images, gradient)
    usual = pooled_with_gradient(lambda x: F.max_pool2d(x, 2), images, gradient)
    for ours, torchs in zip(quick, usual, strict=True):
        assert_same_bits(ours, torchs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_give_torchs_values_and_gradients_after_relu(kernels, shape, dtype):
    assert_pools_as_torch(kernels, random_images(shape, dtype))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0])
def test_the_kernels_choose_as_torch_among_special_values(kernels, special):
    images = random_images((4, 8, 8, 8))
    images[torch.rand(images.shape, device=DEVICE) < 0.4] = special  # windows with one, several and only such values
    assert_pools_as_torch(kernels, images)


def test_the_kernels_take_gradients_that_lie_otherwise(kernels):
    images = random_images((2, 24, 4, 6))
    for gradient in (torch.ones((), device=DEVICE).expand(2, 24, 2, 3), torch.randn(2, 24, 2, 3, device=DEVICE)):
        _, quick = pooled_with_gradient(kernels.MaxPoolTraining.apply, images, gradient)
        _, usual = pooled_with_gradient(lambda x: F.max_pool2d(x, 2), images, gradient)
        assert_same_bits(quick, usual)


def test_gradients_of_gradients_are_torchs(kernels):
    images = random_images((2, 5, 6, 4))

    def second_gradient(pool):
        variable = images.clone().requires_grad_()
        (first,) = torch.autograd.grad((pool(variable**2) ** 3).sum(), variable, create_graph=True)
        return torch.autograd.grad((first**2).sum(), variable)[0]

    usual = second_gradient(lambda x: F.max_pool2d(x, 2))
    assert usual.any() and torch.equal(second_gradient(kernels.MaxPoolTraining.apply), usual)


def test_only_pools_that_the_kernels_can_do_are_quickened(monkeypatch):
    stand_in(monkeypatch, KERNELS)
    layers = [
        nn.MaxPool2d(2),
        nn.MaxPool2d((2, 2), stride=(2, 2), padding=(0, 0)),
        nn.MaxPool2d(3),
        nn.MaxPool2d((2, 1)),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, return_indices=True),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2),
    ]
    quicken_pools(nn.Sequential(*layers))
    assert [isinstance(layer, QuickMaxPool2d) for layer in layers] == [True] * 2 + [False] * 8


def test_without_triton_torchs_pooling_stays(monkeypatch):
    monkeypatch.setattr(KERNELS, "proven", False)
    layer = nn.MaxPool2d(2)
    quicken_pools(layer)
    assert type(layer) is nn.MaxPool2d


def test_quickened_nets_keep_their_state_and_their_values(monkeypatch):
    stand_in(monkeypatch, KERNELS)
    plain, quick = (build_net(NetConfig(name="vgg16-slim"), 3) for _ in range(2))
    quick.load_state_dict(plain.state_dict())
    quicken_pools(quick)
    assert sum(isinstance(module, QuickMaxPool2d) for module in quick.modules()) == 5
    assert list(quick.state_dict()) == list(plain.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(quick(images), plain(images))


@pytest.mark.parametrize(
    ("settings", "quick"),
    [
        ({}, True),
        ({"training": False}, False),
        ({"device": "cpu"}, False),
        ({"dtype": torch.float32}, False),
        ({"memory_format": torch.contiguous_format}, False),
        ({"size": (2, 8, 5, 4)}, False),
        ({"size": (2, 8, 4, 5)}, False),
    ],
)
def test_the_kernels_are_for_even_bfloat16_images_channels_last_on_a_gpu_in_training(monkeypatch, settings, quick):
    taken = []
    stand_in(monkeypatch, KERNELS, MaxPoolTraining=taken.append)
    size = settings.get("size", (2, 8, 4, 4))
    device, dtype = settings.get("device", "cuda"), settings.get("dtype", torch.bfloat16)
    layout = settings.get("memory_format", torch.channels_last)
    pool = QuickMaxPool2d(2).train(settings.get("training", True))
    with FakeTensorMode():  # has tensors "on a GPU" everywhere
        out = pool(torch.empty(size, device=device, dtype=dtype, memory_format=layout))
    assert bool(taken) == quick
    assert quick or out.shape[2:] == (2, 2)
