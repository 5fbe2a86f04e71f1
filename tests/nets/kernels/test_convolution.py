"""Quick convolutions: what torch's give, under the same names, with weights that were rounded all at once."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from closeness import assert_close
from equipoise.nets import NetConfig, build_net
from equipoise.nets.kernels.convolution import (
    PointwiseConv2d,
    QuickConv2d,
    RoundAll,
    quicken_convolutions,
    rounded_weights,
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_product_gives_the_convolutions_values_and_gradients(bias, layout):
    usual, product = nn.Conv2d(5, 7, 1, bias=bias), nn.Conv2d(5, 7, 1, bias=bias)
    product.load_state_dict(usual.state_dict())
    quicken_convolutions(product)
    assert type(product) is PointwiseConv2d
    images = torch.randn(3, 5, 4, 6).contiguous(memory_format=layout)
    results = []
    for layer in (usual, product):
        inputs = images.clone().requires_grad_()
        out = layer(inputs)
        results.append([out, *torch.autograd.grad((out**2).sum(), [inputs, *layer.parameters()])])
    for ours, torchs in zip(*results, strict=True):
        assert ours.shape == torchs.shape
        assert_close(ours, torchs)


def test_channels_stay_last():
    layer = nn.Conv2d(5, 7, 1)
    quicken_convolutions(layer)
    images = torch.randn(3, 5, 4, 6).contiguous(memory_format=torch.channels_last)
    assert layer(images).is_contiguous(memory_format=torch.channels_last)


def test_only_kernels_of_one_pixel_that_look_at_every_channel_become_products():
    layers = [
        nn.Conv2d(4, 4, 1),
        nn.Conv2d(4, 4, 1, padding="valid"),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Conv2d(4, 4, 1, groups=4),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.Conv2d(4, 4, 3, padding=1),
    ]
    quicken_convolutions(nn.Sequential(*layers))
    assert [type(layer) is PointwiseConv2d for layer in layers] == [True, True, False, False, False, False]


def test_most_convolutions_of_an_efficientnet_become_products_without_another_name():
    net = build_net(NetConfig(name="efficientnet-b0"), 3)
    names = list(net.state_dict())
    quicken_convolutions(net)
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    left = [module for module in convolutions if type(module) is QuickConv2d]
    assert len(left) == 17, "the first one, and one for each block"
    assert len(convolutions) - len(left) > 3 * len(left)
    assert list(net.state_dict()) == names


def loss_and_gradients(net, images, parameters, around):
    with around:
        loss = net(images).square().sum()
    return [loss, *torch.autograd.grad(loss, parameters, allow_unused=True)]


def test_weights_copied_in_the_same_precision_change_no_bit():
    net = build_net(NetConfig(name="vgg16-slim"), 3).eval()
    images, parameters = torch.randn(2, 3, 32, 32), list(net.parameters())
    plain = loss_and_gradients(net, images, parameters, nullcontext())
    quicken_convolutions(net)
    copied = loss_and_gradients(net, images, parameters, rounded_weights(net.body, torch.float32))
    assert all(torch.equal(ours, torchs) for ours, torchs in zip(copied, plain, strict=True))
    assert all(module.rounded is None for module in net.modules() if isinstance(module, QuickConv2d))


def test_rounded_weights_are_those_that_a_functional_call_brings():
    net = nn.Sequential(nn.Conv2d(2, 3, 3))
    quicken_convolutions(net)
    images, other = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3, requires_grad=True)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, images):
            with rounded_weights(self.net, torch.float64):
                return self.net[0].rounded

    used = torch.func.functional_call(Around(), {"net.0.weight": other}, (images,))
    assert used.dtype == torch.float64 and torch.equal(used, other.double())
    (gradient,) = torch.autograd.grad(used.sum(), other)
    assert gradient.dtype == torch.float32 and torch.equal(gradient, torch.ones_like(other))


def test_a_weight_that_nobody_used_has_no_gradient():
    used, unused = torch.randn(2, requires_grad=True), torch.randn(3, requires_grad=True)
    rounded, _ = RoundAll.apply(torch.float64, used, unused)
    found = torch.autograd.grad(rounded.sum(), [used, unused], allow_unused=True)
    assert torch.equal(found[0], torch.ones(2)) and found[1] is None


def test_gradients_of_gradients_go_through():
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    (rounded,) = RoundAll.apply(torch.float64, weight)
    (first,) = torch.autograd.grad((rounded**3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert torch.equal(first, 3 * weight**2) and torch.equal(second, 6 * weight)


def test_weights_are_let_go_when_a_pass_fails():
    net = nn.Sequential(nn.Conv2d(2, 3, 3))
    quicken_convolutions(net)
    with pytest.raises(RuntimeError), rounded_weights(net, torch.float32):
        net(torch.randn(1, 5, 5, 5))
    assert net[0].rounded is None
