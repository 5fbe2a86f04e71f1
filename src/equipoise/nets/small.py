"""The nets trained from scratch: a small CNN for a CPU, and the slim VGG-16BN of PRR-Imbalance (2022)."""

from torch import nn

from equipoise.nets.base import Net, conv_block, pooled

SMALL_WIDTHS = (16, 32, 64, 128)
VGG_BLOCKS = ((32, 32), (64, 64), (128, 128, 128), (128, 128, 128), (256, 256, 256))
VGG_FEATURES = 64


def small_cnn(num_classes: int, channels: int, dropout: float) -> Net:
    """Four convolutions, each but the last followed by max pooling; 128 features, from 8 px up."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip((channels, *SMALL_WIDTHS), SMALL_WIDTHS):
        layers += [*conv_block(inputs, outputs), nn.MaxPool2d(2)]
    body = pooled(*layers[:-1])
    return Net(body, nn.Linear(SMALL_WIDTHS[-1], num_classes), dropout, smallest=8)


def vgg16_slim(num_classes: int, channels: int, dropout: float) -> Net:
    """VGG-16 with batch norm, narrow and without biases: 64 features, 2.37 M parameters, from 32 px up."""
    layers: list[nn.Module] = []
    inputs = channels
    for block in VGG_BLOCKS:
        for outputs in block:
            layers += conv_block(inputs, outputs)
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    body = nn.Sequential(
        pooled(*layers),
        nn.Linear(inputs, VGG_FEATURES, bias=False),
        nn.BatchNorm1d(VGG_FEATURES),
        nn.ReLU(inplace=True),
    )
    return Net(body, nn.Linear(VGG_FEATURES, num_classes, bias=False), dropout, smallest=32)
