"""DeepLab-v2 on ResNet-18 (PRR's for prostates): 512 features of each 8th pixel, ImageNet weights; for segmentation.

Chen et al., DeepLab: Semantic Image Segmentation with Deep Convolutional Nets, Atrous Convolution, and Fully Connected
CRFs, TPAMI 2018. The last two stages of ResNet-18 do not halve their maps, and widen their convolutions instead. Four
branches see each place at four scales. Their scores add up: one head on all branches' features computes the same.
"""

import torch
from torch import Tensor, nn

from equipoise.nets.architectures import Architecture
from equipoise.nets.dense import DenseNet
from equipoise.nets.net import Net

WIDTHS = (64, 128, 256, 512)
#: of each stage: how much it halves its maps, and how far apart a convolution's weights lie
STRIDES, DILATIONS = (1, 2, 1, 1), (1, 1, 2, 4)
#: of the branches of atrous spatial pyramid pooling, as in DeepLab-v2's larger field of view
RATES = (6, 12, 18, 24)
BRANCH = 128
OUTPUT_STRIDE = 8


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut; names are those of published weights."""

    def __init__(self, inputs: int, outputs: int, stride: int, dilation: int) -> None:
        super().__init__()
        self.conv1 = _wide(inputs, outputs, stride, dilation)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _wide(outputs, outputs, 1, dilation)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride > 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, maps: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(maps)))))
        return self.relu(inner + self.downsample(maps))


class DeepLab(nn.Module):
    """ResNet-18 with maps of an eighth of the images' sides, and the branches on top."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, WIDTHS[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages = zip((WIDTHS[0], *WIDTHS), WIDTHS, STRIDES, DILATIONS)
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(Block(inputs, outputs, stride, dilation), Block(outputs, outputs, 1, dilation))
            for inputs, outputs, stride, dilation in stages
        )
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(WIDTHS[-1], BRANCH, 3, padding=rate, dilation=rate),
                nn.ReLU(inplace=True),
                nn.Conv2d(BRANCH, BRANCH, 1),
                nn.ReLU(inplace=True),
            )
            for rate in RATES
        )

    def forward(self, images: Tensor) -> Tensor:
        maps = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        maps = self.layer4(self.layer3(self.layer2(self.layer1(maps))))
        return torch.cat([branch(maps) for branch in self.branches], dim=1)


def deeplab_resnet18(num_classes: int, channels: int, dropout: float) -> Net:
    """DeepLab-v2 with ResNet-18."""
    head = nn.Conv2d(len(RATES) * BRANCH, num_classes, 1)
    return DenseNet(DeepLab(channels), head, dropout, stride=OUTPUT_STRIDE, multiple=OUTPUT_STRIDE)


def _wide(inputs: int, outputs: int, stride: int, dilation: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=dilation, dilation=dilation, bias=False)


def published_name(key: str) -> str:
    """ResNet-18's own names; the branches are new."""
    return "" if key.startswith("branches.") else key


NET = Architecture(
    deeplab_resnet18,
    imagenet="https://download.pytorch.org/models/resnet18-f37072fd.pth",
    published_name=published_name,
    dense=True,
)
