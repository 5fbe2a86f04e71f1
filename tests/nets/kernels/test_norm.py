"""The quick batch norm: what torch's gives, in values, gradients and running statistics, under the same names.

Its kernels run here in Triton's interpreter where Triton is installed, and on a GPU where there is one.
"""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from closeness import assert_close
from equipoise.nets import NetConfig, build_net
from equipoise.nets.conditional_generator import ConditionalGenerator
from equipoise.nets.kernels.activations import ACTIVATIONS, LEAK, QuickReLU
from equipoise.nets.kernels.norm import KERNELS, QuickBatchNorm2d, quicken_norms
from kernel_tools import DEVICE, FITTING, fake_images, loaded, stand_in


def test_quickened_nets_keep_their_state_and_their_values():
    plain, quick = (build_net(NetConfig(name="small-cnn"), 3) for _ in range(2))
    quick.load_state_dict(plain.state_dict())
    quicken_norms(quick)
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(plain(images), quick(images))
    for (name, value), (same, other) in zip(plain.state_dict().items(), quick.state_dict().items(), strict=True):
        assert name == same and torch.equal(value, other)


def test_only_norms_that_the_kernels_can_do_are_quickened(monkeypatch):
    stand_in(monkeypatch, KERNELS)
    layers = [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4),
        nn.BatchNorm1d(4),
        nn.GroupNorm(2, 4),
    ]
    layers[4].register_parameter("bias", None)
    quicken_norms(nn.Sequential(*layers))
    assert [isinstance(layer, QuickBatchNorm2d) for layer in layers] == [True] + [False] * 6


def test_without_triton_torchs_norm_stays(monkeypatch):
    monkeypatch.setattr(KERNELS, "proven", False)
    layer = nn.BatchNorm2d(4)
    quicken_norms(layer)
    assert type(layer) is nn.BatchNorm2d


def test_a_relu_that_follows_a_norm_becomes_part_of_it(monkeypatch):
    stand_in(monkeypatch, KERNELS)
    plain = build_net(NetConfig(name="vgg16-slim"), 3)
    quick = build_net(NetConfig(name="vgg16-slim"), 3)
    quick.load_state_dict(plain.state_dict())
    quicken_norms(quick)
    assert sum(type(module) is nn.ReLU for module in quick.modules()) == 1, "the one after the 1-D norm"
    assert {module.activation for module in quick.modules() if isinstance(module, QuickBatchNorm2d)} == {"relu"}
    assert list(quick.state_dict()) == list(plain.state_dict())
    images = torch.randn(4, 3, 32, 32)
    assert torch.equal(quick(images), plain(images))
    assert torch.equal(quick.eval()(images), plain.eval()(images))


@pytest.fixture
def kernels():
    """The kernels, on a GPU or in Triton's interpreter."""
    return loaded(KERNELS)


FEW_ROWS = [(2, 5, 3, 3), (4, 32, 8, 8), (3, 70, 5, 4)]
MANY_ROWS = [(16, 3, 20, 20), (3, 24, 30, 40), (2, 72, 48, 32)]


@pytest.mark.parametrize("shape", FEW_ROWS + MANY_ROWS)
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_the_kernels_give_torchs_values_and_first_and_second_gradients(kernels, shape, activation):
    torch.manual_seed(0)
    x = (2 * torch.randn(shape, device=DEVICE) + 5).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.rand(shape[1], device=DEVICE) + 0.5, torch.randn(shape[1], device=DEVICE)
    gradient = torch.randn_like(x)

    def results(norm):
        running = torch.full_like(weight, 0.3), torch.full_like(weight, 1.7), torch.tensor(4, device=DEVICE)
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        out = norm(*inputs, running)
        first = torch.autograd.grad(out, inputs, gradient, retain_graph=True)
        again = torch.autograd.grad(norm(*inputs, running), inputs[:2], gradient, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in again), inputs[:2])
        return [out, *first, *second, *running[:2]], running[2]

    def ours(x, w, b, running):
        return kernels.BatchNormTraining.apply(x, w, b, running, 0.1, 1e-5, activation)

    quick, steps = results(ours)
    after = ACTIVATIONS[activation].function if activation else torch.Tensor.clone
    usual, _ = results(lambda x, w, b, running: after(F.batch_norm(x, *running[:2], w, b, True, 0.1, 1e-5)))
    assert steps == 6, "two more than before"
    for one, other in zip(quick, usual, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("shape", [FEW_ROWS[2], MANY_ROWS[1]])
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_a_norm_that_stands_still_lets_torchs_gradients_through(kernels, shape, activation):
    torch.manual_seed(0)
    x = (2 * torch.randn(shape, device=DEVICE) + 1).contiguous(memory_format=torch.channels_last)
    weight, bias, mean = (torch.randn(shape[1], device=DEVICE) for _ in range(3))
    variance, gradient = torch.rand(shape[1], device=DEVICE) + 0.5, torch.randn_like(x)

    def results(norm):
        variable = x.clone().requires_grad_()
        out = norm(variable)
        first = torch.autograd.grad(out, variable, gradient)
        (again,) = torch.autograd.grad((norm(variable) ** 2).sum(), variable, create_graph=True)
        return [out, *first, again, *torch.autograd.grad((again**2).sum(), variable)]

    after = ACTIVATIONS[activation].function if activation else torch.Tensor.clone
    quick = results(lambda x: kernels.FrozenBatchNorm.apply(x, weight, bias, mean, variance, 1e-5, activation))
    usual = results(lambda x: after(F.batch_norm(x, mean, variance, weight, bias, False, 0.1, 1e-5)))
    for one, other in zip(quick, usual, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("shape", [FEW_ROWS[1], MANY_ROWS[1]])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_goes_through_as_with_torch(kernels, shape, value):
    x = torch.randn(shape, device=DEVICE).contiguous(memory_format=torch.channels_last)
    x[0, 2, 1, 1] = value
    weight, bias = torch.ones(shape[1], device=DEVICE), torch.zeros(shape[1], device=DEVICE)

    def results(norm):
        running = torch.zeros_like(weight), torch.ones_like(weight), torch.tensor(0, device=DEVICE)
        inputs = x.clone().requires_grad_()
        out = norm(inputs, running)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out)), *running[:2]]

    quick = results(lambda x, running: kernels.BatchNormTraining.apply(x, weight, bias, running, 0.1, 1e-5, "relu"))
    usual = results(lambda x, running: F.relu(F.batch_norm(x, *running[:2], weight, bias, True, 0.1, 1e-5)))
    for ours, torchs in zip(quick, usual, strict=True):
        # Of an infinite value torch's mean is infinite on a CPU and no number on a GPU: either is seen for what it is.
        assert torch.equal(ours.isfinite(), torchs.isfinite())
        assert_close(*(result.where(result.isfinite(), 0) for result in (ours, torchs)))


@pytest.mark.parametrize("activation", ["", "relu", "relu6", "leaky_relu"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_spoils_no_gradient_of_a_norm_that_stands_still(kernels, activation, value):
    x = torch.randn(2, 8, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)
    x[0, 2, 1, 1] = value
    known = [torch.linspace(first, 1, 8, device=DEVICE) for first in (-0.5, -1, 0.3, 0.5)]
    weight, bias, mean, variance = known
    gradient = torch.randn_like(x)

    def of_x(norm):
        variable = x.clone().requires_grad_()
        return torch.autograd.grad(norm(variable), variable, gradient)[0]

    after = ACTIVATIONS[activation].function if activation else torch.Tensor.clone
    ours = of_x(lambda x: kernels.FrozenBatchNorm.apply(x, *known, 1e-5, activation))
    torchs = of_x(lambda x: after(F.batch_norm(x, mean, variance, weight, bias, False, 0.1, 1e-5)))
    assert ours.isfinite().all() and torchs.isfinite().all()
    elsewhere = x.isfinite()  # at the spoilt pixel itself torch's activations are not of one mind
    assert_close(ours[elsewhere], torchs[elsewhere])


@pytest.mark.parametrize(("images", "fit"), [*FITTING, ({"size": (1, 8, 1, 1)}, False)])
def test_the_kernels_train_on_bfloat16_images_channels_last_on_a_gpu(monkeypatch, images, fit):
    taken = []
    stand_in(monkeypatch, KERNELS, BatchNormTraining=lambda x, *_: taken.append(x) or x.detach())
    monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda self, images: images)
    norm = QuickBatchNorm2d(8)
    norm.activation = "relu"
    with FakeTensorMode():
        out = norm(fake_images(**images))
        assert not getattr(norm.eval()(fake_images(**images)), "activated", False)
    assert bool(taken) == fit == getattr(out, "activated", False)


@pytest.mark.parametrize(
    ("settings", "fit"),
    [
        ({}, True),
        ({"training": True}, False),
        ({"weight": True}, False),
        ({"bias": True}, False),
        ({"images": False}, False),
        ({"grad": False}, False),
    ],
)
def test_gradients_go_by_the_kernels_through_norms_that_stand_still(monkeypatch, settings, fit):
    taken = []
    stand_in(
        monkeypatch,
        KERNELS,
        FrozenBatchNorm=lambda *given: taken.append(given) or given[0].detach(),
        BatchNormTraining=lambda x, *_: x.detach(),
    )
    monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda self, images: images)
    norm = QuickBatchNorm2d(8).train(settings.get("training", False))
    norm.weight.requires_grad_(settings.get("weight", False))
    norm.bias.requires_grad_(settings.get("bias", False))
    with FakeTensorMode(), torch.set_grad_enabled(settings.get("grad", True)):
        norm(fake_images().requires_grad_(settings.get("images", True)))
    assert bool(taken) == fit
    if fit:
        expected = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        assert all(one is other for one, other in zip(taken[0][1:5], expected, strict=True))


def test_an_activation_lets_through_once_what_was_activated():
    """Of a residual block that adds in place and uses its activation twice: the second one has work to do."""
    act = QuickReLU()
    values = torch.tensor([-1.0, 2.0])
    values.activated = True
    assert torch.equal(act(values), torch.tensor([-1.0, 2.0]))
    values -= 3
    assert torch.equal(act(values), torch.zeros(2))


def test_a_norm_that_is_used_in_two_places_does_not_activate(monkeypatch):
    stand_in(monkeypatch, KERNELS)
    for places in (
        lambda norm: (nn.Sequential(norm, nn.ReLU()), norm),
        lambda norm: (norm, nn.ReLU(), norm, nn.Tanh()),
    ):
        norm = nn.BatchNorm2d(3)
        quicken_norms(nn.Sequential(*places(norm)))
        assert isinstance(norm, QuickBatchNorm2d) and norm.activation == ""


def test_a_relu_used_twice_takes_the_place_of_no_other_layer(monkeypatch):
    stand_in(monkeypatch, KERNELS)
    relu = nn.ReLU()
    net = nn.Sequential(relu, nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), relu, nn.BatchNorm2d(3), nn.ReLU())
    images = torch.randn(4, 3, 5, 5)
    expected = copy.deepcopy(net)(images)
    quicken_norms(net)
    assert torch.equal(net(images), expected)
    assert [type(layer) for layer in net] == [
        QuickReLU, nn.Conv2d, QuickBatchNorm2d, QuickReLU, QuickBatchNorm2d, QuickReLU
    ]  # fmt: skip


def test_a_leaky_relu_is_part_of_the_norm_before_it_where_the_kernels_know_its_slope(monkeypatch):
    stand_in(monkeypatch, KERNELS)
    net = nn.Sequential(nn.BatchNorm2d(3), nn.LeakyReLU(LEAK), nn.BatchNorm2d(3), nn.LeakyReLU(0.01))
    quicken_norms(net)
    assert [net[0].activation, net[2].activation] == ["leaky_relu", ""]
    generator = ConditionalGenerator(4, 16, width=8)
    quicken_norms(generator)
    norms = [module for module in generator.modules() if isinstance(module, QuickBatchNorm2d)]
    assert {norm.activation for norm in norms} == {"leaky_relu"} and len(norms) == 5


@pytest.mark.parametrize(("name", "activation", "count"), [("resnet18", "relu", 9), ("efficientnet-b0", "silu", 33)])
def test_in_the_packages_blocks_too_what_follows_a_norm_is_part_of_it(monkeypatch, name, activation, count):
    stand_in(monkeypatch, KERNELS)
    plain = build_net(NetConfig(name=name, dropout=0.0, drop_connect=0.0 if "eff" in name else None), 3)
    quick = copy.deepcopy(plain)
    quicken_norms(quick)
    norms = [module for module in quick.modules() if isinstance(module, QuickBatchNorm2d)]
    assert [norm.activation for norm in norms].count(activation) == count
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(quick(images), plain(images)), "as long as nobody has activated, activations act"


def test_what_a_norm_has_activated_is_left_alone(monkeypatch):
    """Blocks as the kernels would see them: norms that activate, and activations that then let values through."""
    stand_in(monkeypatch, KERNELS)
    plain = build_net(NetConfig(name="efficientnet-b0", dropout=0.0, drop_connect=0.0), 3)
    quick = copy.deepcopy(plain)
    quicken_norms(quick)
    seen = []

    def at_once(self, images):
        normal = nn.BatchNorm2d.forward(self, images)
        out = getattr(F, self.activation)(normal) if self.activation else normal
        out.activated = bool(self.activation)
        seen.append(out.activated)
        return out

    monkeypatch.setattr(QuickBatchNorm2d, "forward", at_once)
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(quick(images), plain(images))
    assert sum(seen) == 33


def test_the_kernels_prove_themselves(kernels):
    KERNELS.prove(kernels, torch.device(DEVICE))


def test_kernels_that_give_other_values_are_found_out(monkeypatch):
    def doubled(x, weight, bias, running, momentum, epsilon, activation):
        return 2 * F.relu(F.batch_norm(x.float(), *running[:2], weight, bias, True, momentum, epsilon))

    wrong = stand_in(monkeypatch, KERNELS, BatchNormTraining=doubled)
    with pytest.raises(AssertionError, match="other values than torch"):
        KERNELS.prove(wrong, torch.device("cpu"))
