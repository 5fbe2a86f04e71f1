"""ResNet-18 (He et al., 2016), from MONAI: 512 features, with ImageNet weights.

It is the standard one, with a 7x7 stem of stride 2 and shortcuts without bias.
"""

from torch import nn

from equipoise.core.extras import imported
from equipoise.nets.architectures import Architecture
from equipoise.nets.net import Net

WIDTHS = [64, 128, 256, 512]


def resnet18(num_classes: int, channels: int, dropout: float) -> Net:
    """The standard ResNet-18."""
    body = imported("monai.networks.nets", "monai", "this net").ResNet(
        "basic",
        layers=[2, 2, 2, 2],
        block_inplanes=WIDTHS,
        spatial_dims=2,
        n_input_channels=channels,
        conv1_t_stride=2,
        feed_forward=False,
        bias_downsample=False,
    )
    return Net(body, nn.Linear(WIDTHS[-1], num_classes), dropout, smallest=16)


NET = Architecture(resnet18, imagenet="https://download.pytorch.org/models/resnet18-f37072fd.pth", size=224)
