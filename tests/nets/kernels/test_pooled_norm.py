"""The quick batch norm, activation and max pooling at once: what they give one after the other, bit for bit in values.

Its kernels run here in Triton's interpreter where Triton is installed, and on a GPU where there is one.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from closeness import assert_close
from equipoise.nets import NetConfig, build_net
from equipoise.nets.kernels import norm, pool, quicken
from equipoise.nets.kernels.activations import ACTIVATIONS, Follows
from equipoise.nets.kernels.norm import QuickBatchNorm2d
from equipoise.nets.kernels.pool import QuickMaxPool2d
from equipoise.nets.kernels.pooled_norm import KERNELS, PooledBatchNorm2d
from kernel_tools import DEVICE, FITTING, fake_images, loaded, random_images, stand_in

OPTIONS = (0.1, 1e-5)
#: of more than 1,024 pixels, of which both ways add up statistics alike
SHAPES = [(2, 5, 24, 26), (3, 24, 20, 22), (1, 72, 34, 32), (2, 64, 24, 24)]
#: of fewer
SMALL_SHAPES = [(1, 1, 2, 2), (2, 5, 4, 6), (4, 32, 8, 8)]


@pytest.fixture
def kernels():
    return loaded(KERNELS)


def channels_last(values):
    return values.to(DEVICE).contiguous(memory_format=torch.channels_last)


def halved(shape):
    return *shape[:2], shape[2] // 2, shape[3] // 2


def scales(channels):
    """Weight and bias (C,), of which some weights are negative and one is 0."""
    return torch.linspace(-0.5, 1.5, channels, device=DEVICE), torch.linspace(1, -1, channels, device=DEVICE)


def results(norm, images, gradient):
    """What comes out, what was chosen, gradients of x, weight and bias, and the running statistics, of one step."""
    inputs = [tensor.clone().requires_grad_() for tensor in (images, *scales(images.shape[1]))]
    running = (*(torch.full_like(inputs[1], value) for value in (0.3, 1.7)), torch.tensor(4, device=DEVICE))
    out = norm(*inputs, running)
    chosen = out.grad_fn.saved_tensors[-1]
    found = torch.autograd.grad(out, inputs, gradient)
    return SimpleNamespace(out=out.detach(), chosen=chosen, gradients=found, running=running)


def at_once(kernels, activation="relu"):
    apply = kernels.PooledBatchNormTraining.apply
    return lambda x, weight, bias, running: apply(x, weight, bias, running, *OPTIONS, activation)


def one_by_one(activation="relu"):
    normalise, choose = norm.KERNELS.module.BatchNormTraining.apply, pool.KERNELS.module.MaxPoolTraining.apply
    return lambda x, weight, bias, running: choose(normalise(x, weight, bias, running, *OPTIONS, activation))


def by_torch(x, weight, bias, running):
    return F.max_pool2d(F.relu(F.batch_norm(x, *running[:2], weight, bias, True, *OPTIONS)), 2)


def assert_as_one_by_one(kernels, images, activation="relu"):
    gradient = channels_last(torch.randn(halved(images.shape)).to(images.dtype))
    ours = results(at_once(kernels, activation), images, gradient)
    usual = results(one_by_one(activation), images, gradient)
    assert ours.out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours.out.isnan(), usual.out.isnan())
    assert torch.equal(ours.out.nan_to_num(), usual.out.nan_to_num())
    assert torch.equal(ours.chosen, usual.chosen)
    for one, other in zip(ours.running, usual.running, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    for one, other in zip(ours.gradients, usual.gradients, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert_close(one.nan_to_num(), other.nan_to_num(), 2e-5 if one.dtype == torch.float32 else 0.01)
    return ours


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_choices_and_statistics_are_those_of_one_after_the_other(kernels, shape, dtype):
    assert_as_one_by_one(kernels, random_images(shape, dtype))


@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_other_activations_are_those_of_one_after_the_other(kernels, activation):
    assert_as_one_by_one(kernels, random_images(SHAPES[1], torch.bfloat16), activation)


def test_of_equal_values_the_first_is_chosen_also_where_rounding_or_relu_makes_them_equal(kernels):
    images = random_images(SHAPES[1], torch.bfloat16)
    rounded = assert_as_one_by_one(kernels, images)
    exact = results(at_once(kernels), images.float(), torch.ones(halved(images.shape), device=DEVICE))
    unlike = rounded.chosen != exact.chosen
    assert 0 < unlike.float().mean() < 0.5, "some values are equal because they were rounded"
    flat = rounded.out == 0
    assert flat.any() and not rounded.chosen[flat].any()
    few = random_images(SHAPES[1]).round()  # a few different values alone
    assert_as_one_by_one(kernels, few)


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -0.0])
def test_special_values_go_through_as_one_after_the_other(kernels, special):
    images = random_images(SHAPES[1], torch.bfloat16)
    images[0, 2, 1, 1] = images[1, 7, 4, 4:] = special
    ours = assert_as_one_by_one(kernels, images)
    assert ours.out.isnan().any() == (special != 0)


@pytest.mark.parametrize("shape", SMALL_SHAPES + SHAPES[:1])
def test_the_kernels_give_torchs_values_gradients_and_statistics(kernels, shape):
    images, gradient = random_images(shape), torch.randn(halved(shape), device=DEVICE)
    inputs = [tensor.requires_grad_() for tensor in (images, *scales(shape[1]))]

    def found(norm):
        running = (*(torch.full_like(inputs[1], value) for value in (0.3, 1.7)), torch.tensor(0, device=DEVICE))
        out = norm(*inputs, running)
        return [out, *torch.autograd.grad(out, inputs, gradient), *running[:2]]

    for ours, torchs in zip(found(at_once(kernels)), found(by_torch), strict=True):
        assert_close(ours, torchs, 1e-4)


def test_gradients_of_gradients_are_torchs(kernels):
    inputs = [tensor.requires_grad_() for tensor in (random_images(SHAPES[0]), *scales(SHAPES[0][1]))]

    def second_gradients(norm):
        running = (torch.zeros_like(inputs[1]), torch.ones_like(inputs[1]), torch.tensor(0, device=DEVICE))
        out = norm(*inputs, running)
        first = torch.autograd.grad((out**3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum((gradient**2).sum() for gradient in first), inputs)

    for ours, torchs in zip(second_gradients(at_once(kernels)), second_gradients(by_torch), strict=True):
        assert torchs.any()
        assert_close(ours, torchs, 1e-4)


def test_the_kernels_take_gradients_that_lie_otherwise(kernels):
    images = random_images(SHAPES[0])
    for gradient in (torch.ones((), device=DEVICE).expand(halved(images.shape)), torch.rand(halved(images.shape))):
        otherwise = results(at_once(kernels), images, gradient.to(DEVICE))
        usual = results(at_once(kernels), images, channels_last(gradient))
        assert all(map(torch.equal, otherwise.gradients, usual.gradients))


def test_repeats_give_the_same_bits(kernels):
    times, shape = (200, (32, 96, 32, 32)) if torch.cuda.is_available() else (2, SHAPES[2])
    images, gradient = random_images(shape, torch.bfloat16), channels_last(torch.randn(halved(shape)).bfloat16())
    first = results(at_once(kernels), images, gradient)
    for _ in range(times):
        again = results(at_once(kernels), images, gradient)
        assert torch.equal(first.out, again.out)
        assert all(map(torch.equal, first.gradients + first.running, again.gradients + again.running))


def test_the_kernels_prove_themselves(kernels):
    KERNELS.prove(kernels, torch.device(DEVICE))


def test_kernels_that_give_other_values_are_found_out(kernels):
    class Late:
        @staticmethod
        def apply(*arguments):
            """Chooses among what was not activated."""
            return F.max_pool2d(norm.KERNELS.module.BatchNormTraining.apply(*arguments[:-1], ""), 2)

    with pytest.raises(AssertionError, match="other values"):
        KERNELS.prove(SimpleNamespace(PooledBatchNormTraining=Late), torch.device(DEVICE))


# ---- which norms pool, and who then leaves their images alone ------------------------------------------------


class TorchsNorm:
    """Instead of the kernels: batch norm and activation by torch, and pooling if that is asked for."""

    def __init__(self, pools):
        self.pools, self.calls = pools, 0

    def apply(self, x, weight, bias, running, momentum, epsilon, activation):
        self.calls += 1
        out = getattr(F, activation)(F.batch_norm(x, *running[:2], weight, bias, True, momentum, epsilon))
        running[2].add_(1)
        return F.max_pool2d(out, 2) if self.pools else out


@pytest.fixture
def norms(monkeypatch):
    """Kernels that work everywhere, on any images in training: those of batch norm alone, and with pooling."""
    alone, pooling = TorchsNorm(pools=False), TorchsNorm(pools=True)
    stand_in(monkeypatch, norm.KERNELS, BatchNormTraining=alone.apply)
    stand_in(monkeypatch, pool.KERNELS)
    stand_in(monkeypatch, KERNELS, PooledBatchNormTraining=pooling.apply)
    monkeypatch.setattr("equipoise.nets.kernels.norm.suits", lambda images: True)
    return SimpleNamespace(alone=alone, pooling=pooling)


def plain_and_quick(name):
    plain, quick = (build_net(NetConfig(name=name), 3) for _ in range(2))
    quick.load_state_dict(plain.state_dict())
    quicken(quick)
    return plain, quick


@pytest.mark.parametrize(("name", "count"), [("vgg16-slim", 5), ("small-cnn", 3), ("resnet18", 0)])
def test_norms_before_an_activation_and_pooling_are_found(norms, name, count):
    plain, quick = plain_and_quick(name)
    assert sum(isinstance(module, PooledBatchNorm2d) for module in quick.modules()) == count
    assert list(quick.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(("size", "pooled"), [(32, 5), (36, 4)])
def test_a_net_whose_norms_pool_gives_the_same_and_odd_sides_are_left_to_the_pooling(norms, size, pooled):
    plain, quick = plain_and_quick("vgg16-slim")
    images = torch.randn(2, 3, size, size)
    expected, found = plain(images), quick(images)
    assert torch.equal(found, expected)
    assert (norms.pooling.calls, norms.alone.calls) == (pooled, 13 - pooled)
    for one, other in zip(quick.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(quick.eval()(images), plain.eval()(images))
    assert norms.pooling.calls == pooled, "in training alone"


def test_pooling_after_pooling_is_done(norms):
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2))
    quicken(net)
    assert [type(net[0]), type(net[3])] == [PooledBatchNorm2d, QuickMaxPool2d]
    assert net(torch.randn(2, 3, 8, 8)).shape == (2, 3, 2, 2)


def test_norms_that_something_else_follows_do_not_pool(norms):
    net = nn.Sequential(
        nn.Sequential(nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(3)),
        nn.Sequential(nn.BatchNorm2d(3), nn.Tanh(), nn.MaxPool2d(2)),
        nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.ReLU(), nn.MaxPool2d(2)),
    )
    quicken(net)
    assert not any(isinstance(module, PooledBatchNorm2d) for module in net.modules())


def test_a_norm_that_does_not_activate_does_not_pool(norms):
    """One that is used in two places, before an activation that is part of another norm."""
    norm, relu = nn.BatchNorm2d(3), nn.ReLU()
    net = nn.Sequential(nn.Sequential(norm, relu, nn.MaxPool2d(2)), nn.Sequential(nn.BatchNorm2d(3), relu), norm)
    quicken(net)
    assert isinstance(relu, Follows) and norm.activation == "" and not isinstance(norm, PooledBatchNorm2d)


def test_without_kernels_norms_and_pools_work_one_after_the_other(norms, monkeypatch):
    monkeypatch.setattr(KERNELS, "proven", False)
    plain, quick = plain_and_quick("small-cnn")
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(quick(images), plain(images))
    assert (norms.pooling.calls, norms.alone.calls) == (0, 4)


@pytest.mark.parametrize(
    ("images", "fit"), [*FITTING, ({"size": (2, 8, 5, 4)}, False), ({"size": (2, 8, 4, 5)}, False)]
)
@pytest.mark.parametrize("training", [True, False])
def test_the_kernels_are_for_even_bfloat16_images_channels_last_on_a_gpu_in_training(
    monkeypatch, images, fit, training
):
    taken = []
    stand_in(monkeypatch, KERNELS, PooledBatchNormTraining=lambda x, *_: taken.append(x) or x)
    monkeypatch.setattr(QuickBatchNorm2d, "forward", lambda self, images: images)
    norm = PooledBatchNorm2d(8).train(training)
    with FakeTensorMode():  # has tensors "on a GPU" everywhere
        out = norm(fake_images(**images))
    marks = getattr(out, "activated", False), getattr(out, "pooled", False)
    assert bool(taken) == (fit and training) and marks == (bool(taken), bool(taken))
