"""The slim VGG-16 of PRR-Imbalance (2022): batch norm, no biases, 64 features, 2.37 M parameters, from 32 px up."""

from torch import nn

from equipoise.nets.architectures import Architecture
from equipoise.nets.net import Net, conv_block, pooled

BLOCKS = ((32, 32), (64, 64), (128, 128, 128), (128, 128, 128), (256, 256, 256))
FEATURES = 64


def vgg16_slim(num_classes: int, channels: int, dropout: float) -> Net:
    """VGG-16 with batch norm, narrow and without biases."""
    layers: list[nn.Module] = []
    inputs = channels
    for block in BLOCKS:
        for outputs in block:
            layers += conv_block(inputs, outputs)
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    body = nn.Sequential(
        pooled(*layers),
        nn.Linear(inputs, FEATURES, bias=False),
        nn.BatchNorm1d(FEATURES),
        nn.ReLU(inplace=True),
    )
    return Net(body, nn.Linear(FEATURES, num_classes, bias=False), dropout, smallest=32)


NET = Architecture(vgg16_slim)
