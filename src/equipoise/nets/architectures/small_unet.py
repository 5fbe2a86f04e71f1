"""A small U-Net for a CPU: three levels, 16 features of each pixel; for segmentation."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from equipoise.nets.architectures import Architecture
from equipoise.nets.dense import DenseNet
from equipoise.nets.net import Net, conv_block

WIDTHS = (16, 32, 64)


class UNet(nn.Module):
    """Ronneberger et al., 2015, narrow: each level halves the maps, and the way back sees what the way down had."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(*conv_block(inputs, outputs), *conv_block(outputs, outputs))
            for inputs, outputs in zip((channels, *WIDTHS), WIDTHS)
        )
        self.pool = nn.MaxPool2d(2)
        back = WIDTHS[::-1]
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(inputs, outputs, kernel_size=2, stride=2) for inputs, outputs in pairwise(back)
        )
        self.up = nn.ModuleList(nn.Sequential(*conv_block(2 * outputs, outputs)) for outputs in back[1:])

    def forward(self, images: Tensor) -> Tensor:
        maps, seen = images, []
        for level, layers in enumerate(self.down):
            maps = layers(self.pool(maps) if level else maps)
            seen.append(maps)
        for grow, layers, before in zip(self.grow, self.up, seen[-2::-1]):
            maps = layers(torch.cat([before, grow(maps)], dim=1))
        return maps


def small_unet(num_classes: int, channels: int, dropout: float) -> Net:
    """Two convolutions on each level down, one on each level up."""
    return DenseNet(UNet(channels), nn.Conv2d(WIDTHS[0], num_classes, 1), dropout, multiple=2 ** (len(WIDTHS) - 1))


NET = Architecture(small_unet, dense=True)
