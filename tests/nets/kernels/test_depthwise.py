"""The quick depthwise convolutions: what torch's give, in values and gradients, under the same names.

Their kernels run here in Triton's interpreter where Triton is installed, and on a GPU where there is one.
"""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from closeness import assert_close
from equipoise.nets import NetConfig, build_net
from equipoise.nets.kernels.convolution import QuickConv2d, quicken_convolutions, rounded_weights
from equipoise.nets.kernels.depthwise import KERNELS, DepthwiseConv2d, quicken_depthwise
from kernel_tools import DEVICE, loaded, stand_in

SAME, NONE = (1, 1, 1, 1), (0, 0, 0, 0)
#: shape of images, side of kernels, stride, margins
CASES = [
    ((2, 8, 6, 6), 3, 1, SAME),
    ((1, 3, 5, 7), 3, 1, SAME),
    ((2, 40, 9, 4), 3, 1, NONE),
    ((2, 8, 8, 6), 3, 2, (0, 1, 0, 1)),
    ((1, 11, 7, 10), 3, 2, SAME),
    ((3, 72, 5, 5), 3, 2, (1, 0, 2, 3)),
    ((2, 16, 6, 9), 5, 1, (2, 2, 2, 2)),
    ((1, 5, 8, 5), 5, 1, (4, 1, 0, 5)),
    ((2, 24, 8, 8), 5, 2, (1, 2, 1, 2)),
    ((1, 7, 9, 13), 5, 2, (2, 2, 2, 2)),
    ((33, 8, 4, 4), 5, 1, (2, 2, 2, 2)),
    ((1, 8, 9, 8), 7, 2, (3, 3, 3, 3)),
]


@pytest.fixture
def kernels():
    return loaded(KERNELS)


@pytest.fixture
def proven_kernels(monkeypatch):
    """As where the kernels are proven: weights lie tap by tap, and torch stands in for the kernels themselves."""

    def by_taps(weight):
        return weight.detach().squeeze(1).permute(1, 2, 0).contiguous()

    def apply(x, weight, stride, margins):
        return by_torch(x, weight, stride, margins)

    kernels = stand_in(monkeypatch, KERNELS, DepthwiseConvolution=apply)
    kernels.by_taps = by_taps
    return kernels


def by_torch(x, weight, stride, margins):
    return F.conv2d(F.pad(x, margins), weight, stride=stride, groups=len(weight))


def random_case(shape, side, stride, margins):
    """Images channels last, a weight, and a gradient of what comes out."""
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(shape[1], 1, side, side, device=DEVICE)
    return x, weight, torch.randn_like(by_torch(x, weight, stride, margins))


def with_gradients(convolution, case, stride, margins):
    x, weight, given = case
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = convolution(x, weight, stride, margins)
    return out.detach(), *torch.autograd.grad(out, (x, weight), given)


@pytest.mark.parametrize(("shape", "side", "stride", "margins"), CASES)
def test_the_kernels_give_torchs_values_and_gradients(kernels, shape, side, stride, margins):
    case = random_case(shape, side, stride, margins)
    quick = with_gradients(kernels.DepthwiseConvolution.apply, case, stride, margins)
    usual = with_gradients(by_torch, case, stride, margins)
    for ours, torchs in zip(quick, usual, strict=True):
        assert_close(ours, torchs.double())
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images in quick[:2])


@pytest.mark.parametrize("programs", [1, 7, 10_000])
def test_however_many_programs_share_a_weights_gradient_it_is_the_same(kernels, monkeypatch, programs):
    stride, margins = 1, SAME
    case = random_case((9, 40, 5, 6), 3, stride, margins)
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    monkeypatch.setattr(kernels, "TOTALS_ROWS", 2)
    quick = with_gradients(kernels.DepthwiseConvolution.apply, case, stride, margins)
    assert_close(quick[2], with_gradients(by_torch, case, stride, margins)[2].double())


def test_repeats_give_the_same_bits(kernels):
    case = random_case((17, 24, 4, 4), 3, 1, SAME)
    results = [with_gradients(kernels.DepthwiseConvolution.apply, case, 1, SAME) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("stride", [1, 2])
def test_weights_and_gradients_may_lie_otherwise(kernels, stride):
    x, weight, given = random_case((2, 24, 6, 5), 3, stride, SAME)
    usual = with_gradients(by_torch, (x, weight, given), stride, SAME)
    turned = weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    everywhere = torch.ones((), device=DEVICE).expand_as(given)
    for case in ((x, turned, given), (x, weight.mT.contiguous().mT, given.contiguous())):
        quick = with_gradients(kernels.DepthwiseConvolution.apply, case, stride, SAME)
        for ours, torchs in zip(quick, usual, strict=True):
            assert_close(ours, torchs.double())
    quick = with_gradients(kernels.DepthwiseConvolution.apply, (x, weight, everywhere), stride, SAME)
    assert_close(quick[1], with_gradients(by_torch, (x, weight, everywhere), stride, SAME)[1].double())


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_gradients_that_somebody_needs_are_computed(kernels, monkeypatch, wanted):
    x, weight, given = random_case((1, 8, 5, 5), 3, 1, SAME)
    (x, weight)[wanted].requires_grad_()
    out = kernels.DepthwiseConvolution.apply(x, weight, 1, SAME)
    monkeypatch.setattr(kernels, ("_gradient_of_weight", "_gradient_of_x")[wanted], None)
    (ours,) = torch.autograd.grad(out, (x, weight)[wanted], given)
    assert_close(ours, with_gradients(by_torch, (x, weight, given), 1, SAME)[1 + wanted].double())


@pytest.mark.parametrize(("stride", "margins"), [(1, (2, 2, 2, 2)), (2, (1, 2, 1, 2))])
def test_gradients_of_gradients_are_torchs(kernels, stride, margins):
    x, weight, _ = random_case((2, 5, 6, 7), 5, stride, margins)

    def second_gradients(convolution):
        inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
        first = torch.autograd.grad((convolution(*inputs, stride, margins) ** 3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum((gradient**2).sum() for gradient in first), inputs)

    found = second_gradients(kernels.DepthwiseConvolution.apply)
    for ours, torchs in zip(found, second_gradients(by_torch), strict=True):
        assert torchs.any()
        assert_close(ours, torchs.double())


def test_the_kernels_prove_themselves(kernels):
    KERNELS.prove(kernels, torch.device(DEVICE))


def test_kernels_that_give_other_values_are_found_out(monkeypatch):
    def apply(x, weight, stride, margins):
        return by_torch(x.float(), 1.02 * weight.float(), stride, margins)

    with pytest.raises(AssertionError):
        KERNELS.prove(stand_in(monkeypatch, KERNELS, DepthwiseConvolution=apply), torch.device("cpu"))


def test_only_convolutions_that_the_kernels_can_do_are_quickened(proven_kernels):
    plain = {"groups": 8, "bias": False}
    layers = [
        nn.Conv2d(8, 8, 3, **plain),
        nn.Conv2d(8, 8, 5, stride=2, padding=2, **plain),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 3, groups=4, bias=False),
        nn.Conv2d(8, 16, 3, **plain),
        nn.Conv2d(8, 8, (3, 5), **plain),
        nn.Conv2d(8, 8, 1, **plain),
        nn.Conv2d(8, 8, 3, stride=3, **plain),
        nn.Conv2d(8, 8, 3, stride=(1, 2), **plain),
        nn.Conv2d(8, 8, 3, dilation=2, **plain),
        nn.Conv2d(8, 8, 3, padding="same", **plain),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect", **plain),
        nn.Conv3d(8, 8, 3, **plain),
    ]
    quicken_depthwise(nn.Sequential(*layers))
    assert [isinstance(layer, DepthwiseConv2d) for layer in layers] == [True] * 2 + [False] * 11


def test_a_layer_with_two_owners_is_left_alone(proven_kernels):
    layer = nn.Conv2d(8, 8, 3, groups=8, bias=False)
    quicken_depthwise(nn.Sequential(nn.Sequential(layer), nn.Sequential(nn.ReLU(), layer)))
    assert type(layer) is nn.Conv2d, "one may add zeros before it, the other not"


def test_without_triton_torchs_convolution_stays(monkeypatch):
    monkeypatch.setattr(KERNELS, "proven", False)
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, bias=False))
    quicken_depthwise(net)
    assert type(net[0]) is nn.Conv2d


def test_a_net_without_depthwise_convolutions_needs_no_kernels(monkeypatch):
    monkeypatch.setattr(KERNELS, "usable", pytest.fail)
    quicken_depthwise(build_net(NetConfig(name="small-cnn"), 3))


@pytest.fixture(params=["efficientnet-b0", "efficientnet-lite0"])
def nets(request, proven_kernels):
    """A net, and the same one with quick depthwise convolutions."""
    if request.param == "efficientnet-lite0":
        pytest.importorskip("efficientnet_lite_pytorch", reason="the extra `lite` is not installed")
    plain = build_net(NetConfig(name=request.param, dropout=0.0, drop_connect=0.0), 3)
    quick = copy.deepcopy(plain)
    quicken_depthwise(quick)
    return plain, quick


def quick_layers(net):
    return [module for module in net.modules() if isinstance(module, DepthwiseConv2d)]


def test_every_depthwise_convolution_of_an_efficientnet_is_quick_under_the_same_name(nets):
    plain, quick = nets
    assert len(quick_layers(quick)) == 16, "one for each block"
    assert all(layer.groups == 1 for layer in quick.modules() if type(layer) is nn.Conv2d)
    assert list(quick.state_dict()) == list(plain.state_dict())
    for ours, torchs in zip(quick.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, torchs)


def test_zeros_before_a_depthwise_convolution_are_part_of_it(nets, monkeypatch):
    """Values stay as they are, whether torch convolves or what stands in for the kernels."""
    plain, quick = (net.eval() for net in nets)
    images = torch.randn(2, 3, 64, 64)
    expected = plain(images)
    assert {layer.margins for layer in quick_layers(quick)} == {
        (1, 1, 1, 1), (0, 1, 0, 1), (2, 2, 2, 2), (1, 2, 1, 2)
    }  # fmt: skip
    assert torch.equal(quick(images), expected)
    monkeypatch.setattr("equipoise.nets.kernels.depthwise._suits", lambda *_: True)
    assert torch.equal(quick(images), expected)


def test_what_a_layer_pads_by_itself_comes_on_top(proven_kernels, monkeypatch):
    layer = nn.Conv2d(4, 4, 3, padding=(1, 2), groups=4, bias=False)
    images = torch.randn(2, 4, 6, 6)
    expected = layer(F.pad(images, (0, 1, 2, 0)))
    quicken_depthwise(nn.Sequential(layer))
    layer.margins = (0, 1, 2, 0)
    assert torch.equal(layer(images), expected)
    monkeypatch.setattr("equipoise.nets.kernels.depthwise._suits", lambda *_: True)
    assert torch.equal(layer(images), expected)


def test_weights_lie_as_the_kernels_read_them_when_rounded_too(nets, proven_kernels):
    _, quick = nets
    quicken_convolutions(quick)
    assert len(quick_layers(quick)) == 16, "they are no plain convolutions any more"
    with rounded_weights(quick, torch.float64):
        for layer in quick_layers(quick):
            assert isinstance(layer, QuickConv2d) and layer.rounded.dtype == torch.float64
            assert torch.equal(layer.rounded, layer.weight.double())
            for weight in (layer.weight, layer.rounded):
                assert proven_kernels.by_taps(weight).data_ptr() == weight.data_ptr(), "a view"


@pytest.mark.parametrize(
    ("settings", "quick"),
    [
        ({}, True),
        ({"training": False}, True),
        ({"device": "cpu"}, False),
        ({"dtype": torch.float32}, False),
        ({"weight": torch.float32}, False),
        ({"memory_format": torch.contiguous_format}, False),
        ({"size": (0, 8, 4, 4)}, False),
        ({"size": (2, 8, 1, 1)}, True),
        ({"size": (2, 8, 0, 4)}, False),
    ],
)
def test_the_kernels_are_for_bfloat16_images_and_weights_channels_last_on_a_gpu(monkeypatch, settings, quick):
    def apply(x, weight, stride, margins):
        return "kernels", stride, margins

    stand_in(monkeypatch, KERNELS, DepthwiseConvolution=apply)
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda *given: "torch")
    device, dtype = settings.get("device", "cuda"), settings.get("dtype", torch.bfloat16)
    layout = settings.get("memory_format", torch.channels_last)
    layer = DepthwiseConv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False).train(settings.get("training", True))
    with FakeTensorMode():  # has tensors "on a GPU" everywhere
        layer.rounded = torch.empty(8, 1, 3, 3, device=device, dtype=settings.get("weight", dtype))
        images = torch.empty(settings.get("size", (2, 8, 4, 4)), device=device, dtype=dtype, memory_format=layout)
        assert layer(images) == (("kernels", 2, SAME) if quick else "torch")
