"""Depthwise convolutions that are quick in bfloat16 on a GPU, where cuDNN takes tenths of a second to plan each one
anew for every shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nets.kernels.convolution import QuickConv2d
from equipoise.nets.kernels.owners import layers_of_one_place
from equipoise.nets.kernels.proof import proven, random_images, suits

#: sides of kernels and strides that the kernels are proven for
SIDES, STRIDES = (3, 5), (1, 2)
#: how MONAI's blocks call a depthwise convolution and the padding before it, and the lite package's layers theirs
MONAI_LAYER, MONAI_PADDING, LITE_PADDING = "_depthwise_conv", "_depthwise_conv_padding", "static_padding"

Margins = tuple[int, int, int, int]


class DepthwiseConv2d(QuickConv2d):
    """A convolution of each channel by itself, by kernels of its own for bfloat16 images that lie channels-last on a
    GPU."""

    margins: Margins = (0, 0, 0, 0)
    """Lines of zeros to add before all else: to the left, to the right, on top, at the bottom, as `F.pad` has them."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert not isinstance(self.padding, str)
        down, across = self.padding
        left, right, top, bottom = self.margins
        margins = (left + across, right + across, top + down, bottom + down)
        if not _suits(input, weight, margins):
            return super()._conv_forward(F.pad(input, self.margins) if any(self.margins) else input, weight, bias)
        kernels = quick_depthwise_kernels()
        assert kernels is not None
        return kernels.DepthwiseConvolution.apply(input, weight, self.stride[0], margins)


def _suits(images: Tensor, weight: Tensor, margins: Margins) -> bool:
    """Whether the kernels can do these images; those that are smaller than the weight are left to torch to refuse."""
    left, right, top, bottom = margins
    height, width = images.shape[-2] + top + bottom, images.shape[-1] + left + right
    proper = len(images) > 0 and min(height, width) >= weight.shape[-1]
    return suits(images) and weight.dtype == images.dtype and proper


@lru_cache(maxsize=1)
def quick_depthwise_kernels() -> ModuleType | None:
    """The kernels where they work, else None."""
    load = partial(import_module, "equipoise.nets.kernels.depthwise_kernels")
    return proven(load, prove, "depthwise convolutions by cuDNN, which is slow to start with each new shape")


def prove(kernels: ModuleType, device: torch.device) -> None:
    """Compare the kernels with torch's convolution in float32 on the CPU, which needs no plans, on random values.

    Raises:
        AssertionError: when they differ by more than rounding
    """
    for side in SIDES:
        for stride in STRIDES:
            _compare(kernels, side, stride, device)


def _compare(kernels: ModuleType, side: int, stride: int, device: torch.device) -> None:
    cpu, margins = torch.device("cpu"), (side // 2 + 1 - stride, side // 2, side // 2, side // 2 + 1 - stride)
    values, weight = random_images((2, 40, 11, 8), cpu, 0), random_images((40, 1, side, side), cpu, 1)
    convolution = kernels.DepthwiseConvolution.apply
    quick = _with_gradients(convolution, values.to(device), weight.to(device), stride, margins)
    usual = _with_gradients(_by_torch, values.float(), weight.float(), stride, margins)
    for ours, torchs in zip(quick, usual):
        torch.testing.assert_close(ours.cpu().float(), torchs, rtol=0.01, atol=0.001)


def _with_gradients(
    convolution: Callable[..., Tensor], x: Tensor, weight: Tensor, stride: int, margins: Margins
) -> tuple[Tensor, Tensor, Tensor]:
    """What comes out, and gradients of x and weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = convolution(x, weight, stride, margins)
    given = random_images(tuple(out.shape), torch.device("cpu"), 2).to(out)
    of_x, of_weight = torch.autograd.grad(out, (x, weight), given)
    return out, of_x, of_weight


def _by_torch(x: Tensor, weight: Tensor, stride: int, margins: Margins) -> Tensor:
    return F.conv2d(F.pad(x, margins), weight, stride=stride, groups=len(weight))


def quicken_depthwise(net: nn.Module) -> None:
    """Let the net's depthwise convolutions be quick in bfloat16 on a GPU, and zeros that are added before one be part
    of it. Names and values of its state stay as they are; weights lie in memory as the kernels read them."""
    layers = list(_depthwise_layers(net))
    if not layers or (kernels := quick_depthwise_kernels()) is None:
        return
    for owner, layer in layers:
        margins = _taken_margins(owner, layer)
        layer.__class__ = DepthwiseConv2d
        assert isinstance(layer, DepthwiseConv2d)
        layer.margins = margins
        layer.weight.data = kernels.by_taps(layer.weight).permute(2, 0, 1).unsqueeze(1)


def _depthwise_layers(net: nn.Module) -> Iterator[tuple[nn.Module, nn.Conv2d]]:
    """The convolutions that the kernels can do, and the one module that each is part of: what another adds before it
    would not be seen."""
    for owner, layer in layers_of_one_place(net):
        known = type(layer) is nn.Conv2d or hasattr(layer, LITE_PADDING)
        if known and isinstance(layer, nn.Conv2d) and _is_depthwise(layer):
            yield owner, layer


def _is_depthwise(layer: nn.Conv2d) -> bool:
    side, stride = layer.kernel_size[0], layer.stride[0]
    plain = layer.bias is None and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    square = tuple(layer.kernel_size) == (side, side) and tuple(layer.stride) == (stride, stride)
    each = layer.groups == layer.in_channels == layer.out_channels and tuple(layer.dilation) == (1, 1)
    return plain and square and each and side in SIDES and stride in STRIDES


def _taken_margins(owner: nn.Module, layer: nn.Conv2d) -> Margins:
    """The zeros that a package adds before this layer, which from now on the layer adds itself."""
    inner, outer = getattr(layer, LITE_PADDING, None), getattr(owner, MONAI_PADDING, None)
    if inner is not None:
        delattr(layer, LITE_PADDING)
        padding = inner
    elif layer is getattr(owner, MONAI_LAYER, None) and isinstance(outer, nn.ConstantPad2d) and outer.value == 0:
        setattr(owner, MONAI_PADDING, nn.Identity())
        padding = outer
    else:
        return 0, 0, 0, 0
    left, right, top, bottom = padding.padding if isinstance(padding, nn.ConstantPad2d) else (0, 0, 0, 0)
    return left, right, top, bottom
