"""Convolutions of one pixel as matrix products: what the convolution gives, under the same names."""

import pytest
import torch
from torch import nn

from closeness import assert_close
from equipoise.nets import NetConfig, build_net
from equipoise.nets.quick.pointwise import PointwiseConv2d, multiply_pointwise


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_product_gives_the_convolutions_values_and_gradients(bias, layout):
    usual, product = nn.Conv2d(5, 7, 1, bias=bias), nn.Conv2d(5, 7, 1, bias=bias)
    product.load_state_dict(usual.state_dict())
    multiply_pointwise(product)
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
    multiply_pointwise(layer)
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
    multiply_pointwise(nn.Sequential(*layers))
    assert [type(layer) is PointwiseConv2d for layer in layers] == [True, True, False, False, False, False]


def test_most_convolutions_of_an_efficientnet_become_products_without_another_name():
    net = build_net(NetConfig(name="efficientnet-b0"), 3)
    names = list(net.state_dict())
    multiply_pointwise(net)
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    left = [module for module in convolutions if type(module) is nn.Conv2d]
    assert len(left) == 17, "the first one, and one for each block"
    assert len(convolutions) - len(left) > 3 * len(left)
    assert list(net.state_dict()) == names
