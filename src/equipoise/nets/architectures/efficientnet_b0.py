"""EfficientNet-B0 (Tan and Le, 2019), from MONAI: 1280 features, with ImageNet weights."""

import re

from torch import nn

from equipoise.core.extras import imported
from equipoise.nets.architectures import Architecture
from equipoise.nets.architectures._efficientnet import RATE, without_classifier
from equipoise.nets.net import Net


def efficientnet_b0(num_classes: int, channels: int, dropout: float, drop_connect: float) -> Net:
    """EfficientNet-B0."""
    efficientnet = imported("monai.networks.nets", "monai", "this net").efficientnet
    body = efficientnet.EfficientNetBN(
        "efficientnet-b0", pretrained=False, in_channels=channels, num_classes=num_classes
    )
    blocks = [module for module in body.modules() if isinstance(module, efficientnet.MBConvBlock)]
    for index, block in enumerate(blocks):
        block.drop_connect_rate = drop_connect * index / len(blocks)
    for module in (body, *blocks):
        module._swish = nn.SiLU()  # one fused kernel in place of an autograd function written in Python
    return without_classifier(body, num_classes, dropout)


def published_name(key: str) -> str:
    """The name in Melas-Kyriazi's EfficientNet-PyTorch: MONAI groups the blocks into stages."""
    return re.sub(r"^_blocks\.\d+\.", "_blocks.", key)


NET = Architecture(
    efficientnet_b0,
    dropout=RATE,
    drop_connect=RATE,
    imagenet="https://github.com/lukemelas/EfficientNet-PyTorch/releases/download/1.0/efficientnet-b0-355c32eb.pth",
    published_name=published_name,
    size=224,
)
