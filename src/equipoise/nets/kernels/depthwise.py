"""Depthwise convolutions in bfloat16 on a GPU, where cuDNN takes tenths of a second to plan each one anew for every
shape."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels.convolution import QuickConv2d
from equipoise.nets.kernels.proof import Case, Kernels, random_values
from equipoise.nets.kernels.replacement import Replacement, layers_of_one_place, suits

#: sides of kernels and strides that the kernels are proven for
SIDES, STRIDES = (3, 5), (1, 2)
#: what MONAI's blocks call a depthwise convolution and the padding before it, and the lite package its padding
MONAI_LAYER, MONAI_PADDING, LITE_PADDING = "_depthwise_conv", "_depthwise_conv_padding", "static_padding"

Margins = tuple[int, int, int, int]


def _cases(kernels: ModuleType, device: torch.device) -> Iterator[Case]:
    for side, stride in product(SIDES, STRIDES):
        yield _case(kernels, side, stride, device)


def _case(kernels: ModuleType, side: int, stride: int, device: torch.device) -> Case:
    """Torch convolves on the CPU, which needs no plans."""
    margins = (side // 2 + 1 - stride, side // 2, side // 2, side // 2 + 1 - stride)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.DepthwiseConvolution.apply(x, weight, stride, margins)

    def torchs(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(F.pad(x.cpu(), margins), weight.cpu(), stride=stride, groups=len(weight))

    inputs = random_values((2, 40, 11, 8), device), random_values((40, 1, side, side), device, seed=2)
    return Case(ours, torchs, inputs, _assert_close)


def _assert_close(ours: Tensor, torchs: Tensor) -> None:
    torch.testing.assert_close(ours.cpu().float(), torchs.cpu(), rtol=0.01, atol=0.001)


KERNELS = Kernels(
    "depthwise_kernels", _cases, "depthwise convolutions by cuDNN, which is slow to start with each new shape"
)


class DepthwiseConv2d(QuickConv2d):
    """A convolution of each channel by itself, with kernels for images and weights that suit them."""

    margins: Margins = (0, 0, 0, 0)
    """Lines of zeros to add before all else: to the left, to the right, on top, at the bottom, as `F.pad` has them."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert not isinstance(self.padding, str)
        down, across = self.padding
        left, right, top, bottom = self.margins
        margins = (left + across, right + across, top + down, bottom + down)
        if not _suits(input, weight, margins):
            return super()._conv_forward(F.pad(input, self.margins) if any(self.margins) else input, weight, bias)
        return KERNELS.module.DepthwiseConvolution.apply(input, weight, self.stride[0], margins)


def _suits(images: Tensor, weight: Tensor, margins: Margins) -> bool:
    """Whether the kernels can do these images; those that are smaller than the weight are left to torch to refuse."""
    left, right, top, bottom = margins
    height, width = images.shape[-2] + top + bottom, images.shape[-1] + left + right
    proper = len(images) > 0 and min(height, width) >= weight.shape[-1]
    return suits(images) and weight.dtype == images.dtype and proper


def _depthwise_layers(net: nn.Module) -> Iterator[nn.Module]:
    """The convolutions that the kernels can do, of one place each: zeros that a second owner adds would be missed."""
    for _, layer in layers_of_one_place(net):
        known = type(layer) is nn.Conv2d or hasattr(layer, LITE_PADDING)
        if known and isinstance(layer, nn.Conv2d) and _is_depthwise(layer):
            yield layer


def _is_depthwise(layer: nn.Conv2d) -> bool:
    side, stride = layer.kernel_size[0], layer.stride[0]
    plain = layer.bias is None and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    square = tuple(layer.kernel_size) == (side, side) and tuple(layer.stride) == (stride, stride)
    each = layer.groups == layer.in_channels == layer.out_channels and tuple(layer.dilation) == (1, 1)
    return plain and square and each and side in SIDES and stride in STRIDES


def _settle(net: nn.Module) -> None:
    """Make zeros that are added before a quick layer part of it, and lay its weight out as the kernels read it."""
    for owner, layer in layers_of_one_place(net):
        if isinstance(layer, DepthwiseConv2d):
            layer.margins = _taken_margins(owner, layer) or layer.margins
            layer.weight.data = KERNELS.module.by_taps(layer.weight).permute(2, 0, 1).unsqueeze(1)


def _taken_margins(owner: nn.Module, layer: nn.Conv2d) -> Margins | None:
    """The zeros that a package adds before this layer, which the layer adds itself from now on."""
    inner, outer = getattr(layer, LITE_PADDING, None), getattr(owner, MONAI_PADDING, None)
    if inner is not None:
        delattr(layer, LITE_PADDING)
        padding = inner
    elif layer is getattr(owner, MONAI_LAYER, None) and isinstance(outer, nn.ConstantPad2d) and outer.value == 0:
        setattr(owner, MONAI_PADDING, nn.Identity())
        padding = outer
    else:
        return None
    left, right, top, bottom = padding.padding if isinstance(padding, nn.ConstantPad2d) else (0, 0, 0, 0)
    return left, right, top, bottom


quicken_depthwise = Replacement(DepthwiseConv2d, _depthwise_layers, KERNELS, settle=_settle)
