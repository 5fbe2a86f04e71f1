"""What nets for segmentation look like from outside: a body that gives feature maps, and a 1x1 convolution as head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.core.errors import UserError
from equipoise.nets.net import Net


class DenseNet(Net):
    """A net that classifies pixels: images (B, C, H, W) -> feature maps (B, D, h, w) -> logits (B, num_classes, H, W).

    Where the maps are `stride` times smaller than the images, the logits are enlarged.
    """

    dense = True

    def __init__(
        self, body: nn.Module, head: nn.Conv2d, dropout: float = 0.0, stride: int = 1, multiple: int = 1
    ) -> None:
        """`body` maps images, whose sides are a multiple of `multiple`, to feature maps."""
        nn.Module.__init__(self)
        self.body = body
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.head = head  # type: ignore[assignment]
        self.smallest = multiple
        self.stride, self.multiple = stride, multiple

    @property
    def feature_size(self) -> int:
        """D, the number of features of a pixel."""
        return self.head.in_channels  # type: ignore[return-value]

    def features(self, images: Tensor) -> Tensor:
        """Feature maps (B, D, h, w) of images (B, C, H, W), before dropout."""
        height, width = images.shape[-2:]
        if height % self.multiple or width % self.multiple:
            raise UserError(
                f"images of {height}x{width} pixels do not fit this net, whose sides are multiples of {self.multiple}; "
                "set augment.size, or prepare images of another data.size"
            )
        return super().features(images)

    def logits_of(self, head: nn.Module, features: Tensor) -> Tensor:
        """Logits (B, num_classes, H, W) that a head like the net's own makes of feature maps, after dropout."""
        return enlarged(head(features), self.stride)

    def another_head(self) -> nn.Module:
        head: nn.Conv2d = self.head  # type: ignore[assignment]
        return nn.Conv2d(head.in_channels, head.out_channels, 1, bias=head.bias is not None)


def enlarged(maps: Tensor, factor: int) -> Tensor:
    """Maps (B, C, h, w) by bilinear interpolation to (B, C, factor h, factor w).

    Written as two products of matrices: the gradient of torch's own interpolation differs from run to run on a GPU.
    """
    if factor == 1:
        return maps
    down, across = (_weights(size, factor, maps) for size in maps.shape[-2:])
    return down @ (maps @ across.T)


def _weights(size: int, factor: int, like: Tensor) -> Tensor:
    """(factor size, size) by which each row of an enlarged map is a mean of two rows, pixels being little squares."""
    places = ((torch.arange(size * factor, device=like.device) + 0.5) / factor - 0.5).clamp(0, size - 1)
    rows = torch.arange(size, device=like.device)
    return (1 - (places[:, None] - rows).abs()).clamp(min=0).to(like.dtype)
