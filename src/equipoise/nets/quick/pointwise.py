"""Convolutions of one pixel as matrix products, for channels-last images on a GPU.

The values are the same. What is saved is cuDNN's search for a plan at each new shape, which for the many such layers of
an EfficientNet takes longer than all captures of a run.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PointwiseConv2d(nn.Conv2d):
    """`nn.Conv2d` with a kernel of one pixel."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), channels last."""
        return F.linear(images.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def multiply_pointwise(net: nn.Module) -> None:
    """Let the net's convolutions of one pixel be matrix products. Names and values of its state stay as they are."""
    for module in net.modules():
        if type(module) is nn.Conv2d and _is_pointwise(module):
            module.__class__ = PointwiseConv2d


def _is_pointwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == layer.stride == (1, 1) and layer.padding in ((0, 0), "valid") and layer.groups == 1
