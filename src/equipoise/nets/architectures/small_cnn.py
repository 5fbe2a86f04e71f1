"""A small CNN for a CPU: four convolutions, 128 features, from 8 px up."""

from torch import nn

from equipoise.nets.architectures import Architecture
from equipoise.nets.net import Net, conv_block, pooled

WIDTHS = (16, 32, 64, 128)


def small_cnn(num_classes: int, channels: int, dropout: float) -> Net:
    """Four convolutions, each but the last followed by max pooling."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip((channels, *WIDTHS), WIDTHS):
        layers += [*conv_block(inputs, outputs), nn.MaxPool2d(2)]
    body = pooled(*layers[:-1])
    return Net(body, nn.Linear(WIDTHS[-1], num_classes), dropout, smallest=8)


NET = Architecture(small_cnn)
